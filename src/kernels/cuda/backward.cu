#include "inplace_abn/kernels.h"
#include "verbatim.cuh"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

// dx = from_dy * dy + from_xhat * xhat + constant. In place of xhat there may be an affine function of it, such as y.
template <typename opmath_t>
struct Combination {
  opmath_t from_dy, from_xhat, constant;

  // Frozen statistics have no part of xhat in dx, not even of an infinite one.
  __device__ __forceinline__ opmath_t operator()(opmath_t dy, opmath_t xhat) const {
    return from_dy * dy + from_xhat * (from_xhat == 0 ? opmath_t(0) : xhat) + constant;
  }
};

// Where a channel's results go. Null: not wanted.
template <typename scalar_t>
struct Results {
  using opmath_t = opmath_type<scalar_t>;
  opmath_t *sum_dy, *sum_xhat_dy;
  ChannelVector<scalar_t> var, dweight, dbias;
  Combination<opmath_t>* combinations;
  bool of_xhat;   // dx is a combination of dy and xhat, else of dy and y
  bool training;  // else statistics are constants
  double count;

  __device__ void store(int64_t c, const Affine<scalar_t>& affine, const Totals& totals) const {
    const auto gamma = static_cast<double>(affine.gamma(c)), beta = static_cast<double>(affine.beta(c));
    const auto divisor = static_cast<double>(affine.divisor(c));
    const double total_dy = totals.first, total_xhat_dy = totals.second / divisor;
    if (sum_dy != nullptr) sum_dy[c] = static_cast<opmath_t>(total_dy);
    if (sum_xhat_dy != nullptr) sum_xhat_dy[c] = static_cast<opmath_t>(total_xhat_dy);
    if (dweight) dweight.store(c, total_xhat_dy * static_cast<double>(affine.dgamma(c)));
    if (dbias) dbias.store(c, total_dy);
    if (combinations == nullptr) return;
    const auto inv_std = static_cast<double>(affine.inv_std(var.load(c)));
    const double from_xhat = training ? -gamma * inv_std * total_xhat_dy / count : 0;
    const double constant = training ? -gamma * inv_std * total_dy / count : 0;
    const double from_y = from_xhat / divisor;
    combinations[c] = {static_cast<opmath_t>(gamma * inv_std), static_cast<opmath_t>(of_xhat ? from_xhat : from_y),
                       static_cast<opmath_t>(of_xhat ? constant : constant - from_y * beta)};
  }
};

// Inverts z, and sums dy and xhat * dy. If it `stores`, it also writes xhat and dy.
template <typename scalar_type, typename Act, bool with_residual, bool stores>
struct Reduce {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = with_residual ? 3 : 2, outputs = stores ? 2 : 0, needed_outputs = outputs;
  static constexpr int unroll = stores && heavy<Act> ? 1 : 2;
  static constexpr bool at_once = false, reduces = true, much_arithmetic = heavy<Act>;
  using Sum = Sums<opmath_t>;
  struct Channel {
    opmath_t beta, inverse_gamma;
  };

  Affine<scalar_t> affine;
  Act act;
  Results<scalar_t> results;

  __device__ Channel channel(int64_t c) const { return {affine.beta(c), stores ? 1 / affine.divisor(c) : opmath_t(0)}; }

  __device__ static Totals totals(const Channel&, const Sum& sum, opmath_t) {
    return {static_cast<double>(sum.dy), static_cast<double>(sum.dy_centred)};
  }

  __device__ void finish(int64_t c, const Totals& totals) const { results.store(c, affine, totals); }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum& sum,
                                       const Tile<items, width>&) const {
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      opmath_t y, dy;
      act.inverse(in[0][e], static_cast<opmath_t>(in[1][e]), y, dy);
      if constexpr (with_residual) y -= static_cast<opmath_t>(in[2][e]);
      const opmath_t centred = y - channel.beta;
      sum.dy += dy;
      sum.dy_centred += dy * centred;
      if constexpr (stores) {
        out[0][e] = static_cast<scalar_t>(centred * channel.inverse_gamma);
        out[1][e] = static_cast<scalar_t>(dy);
      }
    }
  }
};

// dx from xhat and dy.
template <typename scalar_type>
struct Combine {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = 2, outputs = 1, needed_outputs = 1, unroll = 2;
  static constexpr bool at_once = false, reduces = false, much_arithmetic = false;
  using Sum = NoSum;
  using Channel = Combination<opmath_t>;

  BackwardArgs<scalar_t> args;

  __device__ Channel channel(int64_t c) const {
    const opmath_t of_dy = args.of_dy(c), of_means = args.of_means(c);
    if (args.mean_dy == nullptr) return {of_dy, 0, 0};
    return {of_dy, -of_means * args.mean_xhat_dy[c], -of_means * args.mean_dy[c]};
  }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum&,
                                       const Tile<items, width>&) const {
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      out[0][e] = static_cast<scalar_t>(channel(static_cast<opmath_t>(in[1][e]), static_cast<opmath_t>(in[0][e])));
    }
  }
};

// dx from z and dz, which are inverted a second time; dy is stored as the residual's gradient.
template <typename scalar_type, typename Act, bool with_residual>
struct InvertAndCombine {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = with_residual ? 3 : 2, outputs = inputs - 1;
  static constexpr int needed_outputs = with_residual ? 0 : 1, unroll = 2;
  static constexpr bool at_once = false, reduces = false, much_arithmetic = heavy<Act>;
  using Sum = NoSum;
  using Channel = Combination<opmath_t>;

  const Combination<opmath_t>* combinations;
  Act act;

  __device__ Channel channel(int64_t c) const { return combinations[c]; }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum&,
                                       const Tile<items, width>&) const {
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      opmath_t y, dy;
      act.inverse(in[0][e], static_cast<opmath_t>(in[1][e]), y, dy);
      if constexpr (with_residual) {
        y -= static_cast<opmath_t>(in[2][e]);
        out[1][e] = static_cast<scalar_t>(dy);
      }
      out[0][e] = static_cast<scalar_t>(channel(dy, y));
    }
  }
};

// Calls f with the functor that inverts z, and with whether there is a residual.
template <typename scalar_t, typename F>
void visit(const ActivationArgs& activation, const View<const scalar_t>& residual, const F& f) {
  visit_activation<scalar_t>(activation.kind, activation.param, [&](auto act) {
    if (residual.data == nullptr) {
      f(act, std::false_type{});
    } else {
      f(act, std::true_type{});
    }
  });
}

// Whether dx comes from the xhat and dy that the first pass left, instead of from z and dz inverted once more. That
// saves an inversion and costs two writes. By an estimate from the number of instructions (docs/gpu.md), only what has
// a minimum in 16 bits, as silu, and doubles take longer to invert than to write.
template <typename scalar_t, typename Act>
constexpr bool inverts_once = std::is_same_v<scalar_t, double> ? heavy<Act> : sizeof(scalar_t) == 2 && has_minimum<Act>;

}  // namespace

template <typename scalar_t>
void backward_reduce(const BackwardReduceArgs<scalar_t>& args) {
  const Results<scalar_t> results{.sum_dy = args.sum_dy, .sum_xhat_dy = args.sum_xhat_dy};
  visit(args.activation, args.residual, [&](auto act, auto with_residual) {
    reduce(args.extent, Reduce<scalar_t, decltype(act), with_residual(), true>{args.affine, act, results},
           {{args.z, args.dz, args.residual}, {args.xhat, args.dy}});
  });
  take_verbatim(args);
}

template <typename scalar_t>
void verbatim_gradient(const VerbatimGradientArgs<scalar_t>& args) {
  if (!args.verbatim) return;
  const VerbatimPartition p(args.verbatim, args.extent);
  visit_activation<scalar_t>(args.activation.kind, args.activation.param, [&](auto act) {
    using Act = decltype(act);
    if constexpr (is_curved<Act>) {
      launch(differentiate_kernel<scalar_t, Act>, p.rows * p.parts, verbatim_threads, args, p.parts, act);
    }
  });
}

template <typename scalar_t>
void backward(const BackwardArgs<scalar_t>& args) {
  apply(args.extent, Combine<scalar_t>{args}, {{args.xhat, args.dy}, {args.dx}});
}

template <typename scalar_t>
void local_backward(const LocalBackwardArgs<scalar_t>& args) {
  const Scratch<Combination<opmath_type<scalar_t>>> combinations(args.extent.channels);
  const bool sums_needed = args.training || args.dweight || args.dbias;
  visit(args.activation, args.residual, [&](auto act, auto with_residual) {
    using Act = decltype(act);
    using FromXhat = InvertAndCombine<scalar_t, Identity<scalar_t>, false>;
    // dy goes to dresidual; without one, to dx, until dx itself is written.
    const View<scalar_t> dy = with_residual() ? args.dresidual : args.dx;
    const bool of_xhat = inverts_once<scalar_t, Act> && sums_needed && args.xhat.data != nullptr &&
                         args.dx.data != nullptr && dy.data != nullptr;
    const Results<scalar_t> results{.var = args.var,
                                    .dweight = args.dweight,
                                    .dbias = args.dbias,
                                    .combinations = combinations.data(),
                                    .of_xhat = of_xhat,
                                    .training = args.training,
                                    .count = static_cast<double>(args.extent.batch * args.extent.space)};
    if (of_xhat) {
      const Reduce<scalar_t, Act, with_residual(), true> op{args.affine, act, results};
      reduce(args.extent, op, {{args.z, args.dz, args.residual}, {args.xhat, dy}});
      const View<const scalar_t> xhat{args.xhat.data, args.xhat.batch_stride, args.xhat.channel_stride};
      apply(args.extent, FromXhat{results.combinations, {}},
            {{xhat, {dy.data, dy.batch_stride, dy.channel_stride}}, {args.dx}});
      return;
    }
    const Reduce<scalar_t, Act, with_residual(), false> op{args.affine, act, results};
    if (sums_needed) {
      reduce(args.extent, op, {{args.z, args.dz, args.residual}, {}});
    } else {
      finish_channels_of(op, nullptr, 0, args.extent.channels);
    }
    if (args.dx.data != nullptr || args.dresidual.data != nullptr) {
      apply(args.extent, InvertAndCombine<scalar_t, Act, with_residual()>{results.combinations, act},
            {{args.z, args.dz, args.residual}, {args.dx, args.dresidual}});
    }
  });
}

#define INSTANTIATE(scalar_t)                                             \
  template void backward_reduce(const BackwardReduceArgs<scalar_t>&);     \
  template void backward(const BackwardArgs<scalar_t>&);                  \
  template void verbatim_gradient(const VerbatimGradientArgs<scalar_t>&); \
  template void local_backward(const LocalBackwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
