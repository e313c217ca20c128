#include "inplace_abn/kernels.h"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

// Inverts z and sums; if it `stores`, leaves xhat and dy, for ops that are not local.
template <typename scalar_type, typename Act, bool with_residual, bool stores>
struct Reduce {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = with_residual ? 3 : 2, outputs = stores ? 2 : 0, needed_outputs = outputs;
  static constexpr int unroll = stores && heavy<Act> ? 1 : 2;
  static constexpr bool at_once = false, reduces = true, much_arithmetic = heavy<Act>;
  template <typename T>
  using Value = Sums<T>;
  template <typename T>
  using Sum = Sums<T>;
  struct Channel {
    opmath_t beta, inverse_gamma;
  };

  Affine<scalar_t> affine;
  Act act;

  __device__ Channel channel(int64_t c) const { return {affine.beta(c), stores ? 1 / affine.gamma(c) : opmath_t(0)}; }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum<opmath_t>& sum,
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

// dx = from_dy * dy + from_xhat * xhat + constant, where xhat may stand for any affine image of it.
template <typename opmath_t>
struct Combination {
  opmath_t from_dy, from_xhat, constant;

  __device__ __forceinline__ opmath_t operator()(opmath_t dy, opmath_t xhat) const {
    return from_dy * dy + from_xhat * xhat + constant;
  }
};

// dx from xhat and dy.
template <typename scalar_type>
struct Combine {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = 2, outputs = 1, needed_outputs = 1, unroll = 2;
  static constexpr bool at_once = false, reduces = false, much_arithmetic = false;
  template <typename T>
  using Value = NoValue<T>;
  template <typename T>
  using Sum = NoValue<T>;
  using Channel = Combination<opmath_t>;

  ChannelVector<scalar_t> var;
  Affine<scalar_t> affine;
  const opmath_t *mean_dy, *mean_xhat_dy;

  __device__ Channel channel(int64_t c) const {
    const opmath_t scale = affine.gamma(c) * affine.inv_std(var.load(c));
    if (mean_dy == nullptr) return {scale, 0, 0};
    return {scale, -scale * mean_xhat_dy[c], -scale * mean_dy[c]};
  }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum<opmath_t>&,
                                       const Tile<items, width>&) const {
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      out[0][e] = static_cast<scalar_t>(channel(static_cast<opmath_t>(in[1][e]), static_cast<opmath_t>(in[0][e])));
    }
  }
};

// The same from z and dz, inverted once more; dy is the residual's gradient.
template <typename scalar_type, typename Act, bool with_residual>
struct InvertAndCombine {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = with_residual ? 3 : 2, outputs = inputs - 1;
  static constexpr int needed_outputs = with_residual ? 0 : 1, unroll = 2;
  static constexpr bool at_once = false, reduces = false, much_arithmetic = heavy<Act>;
  template <typename T>
  using Value = NoValue<T>;
  template <typename T>
  using Sum = NoValue<T>;
  using Channel = Combination<opmath_t>;

  const Combination<opmath_t>* combinations;
  Act act;

  __device__ Channel channel(int64_t c) const { return combinations[c]; }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum<opmath_t>&,
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

template <typename scalar_t>
struct StoreSums {
  Affine<scalar_t> affine;
  opmath_type<scalar_t>*sum_dy, *sum_xhat_dy;

  __device__ void operator()(int64_t c, const Partial<Sums>& partial) const {
    using opmath_t = opmath_type<scalar_t>;
    sum_dy[c] = static_cast<opmath_t>(partial.value.dy);
    sum_xhat_dy[c] = static_cast<opmath_t>(partial.value.dy_centred / static_cast<double>(affine.gamma(c)));
  }
};

// Stores the parameters' gradients, and dx as a combination of dy and y.
template <typename scalar_t>
struct StoreCombination {
  using opmath_t = opmath_type<scalar_t>;
  Affine<scalar_t> affine;
  ChannelVector<scalar_t> var, dweight, dbias;
  bool training;
  double count;
  Combination<opmath_t>* combinations;

  __device__ void operator()(int64_t c, const Partial<Sums>& partial) const {
    const auto gamma = static_cast<double>(affine.gamma(c)), beta = static_cast<double>(affine.beta(c));
    const auto inv_std = static_cast<double>(affine.inv_std(var.load(c)));
    const double sum_dy = partial.value.dy, sum_xhat_dy = partial.value.dy_centred / gamma;
    if (dweight) dweight.store(c, sum_xhat_dy * static_cast<double>(affine.dgamma(c)));
    if (dbias) dbias.store(c, sum_dy);
    const double from_y = training ? -inv_std * sum_xhat_dy / count : 0;
    const double constant = training ? -gamma * inv_std * sum_dy / count - from_y * beta : 0;
    combinations[c] = {static_cast<opmath_t>(gamma * inv_std), static_cast<opmath_t>(from_y),
                       static_cast<opmath_t>(constant)};
  }
};

}  // namespace

template <typename scalar_t>
void backward_reduce(const BackwardReduceArgs<scalar_t>& args) {
  visit(args.activation, args.residual, [&](auto act, auto with_residual) {
    reduce(args.extent, Reduce<scalar_t, decltype(act), with_residual(), true>{args.affine, act},
           {{args.z, args.dz, args.residual}, {args.xhat, args.dy}},
           StoreSums<scalar_t>{args.affine, args.sum_dy, args.sum_xhat_dy});
  });
}

template <typename scalar_t>
void backward(const BackwardArgs<scalar_t>& args) {
  apply(args.extent, Combine<scalar_t>{args.var, args.affine, args.mean_dy, args.mean_xhat_dy},
        {{args.xhat, args.dy}, {args.dx}});
}

template <typename scalar_t>
void local_backward(const LocalBackwardArgs<scalar_t>& args) {
  using opmath_t = opmath_type<scalar_t>;
  const bool sums_needed = args.training || args.dweight || args.dbias;
  const bool writes = args.dx.data != nullptr || args.dresidual.data != nullptr;
  const auto count = static_cast<double>(args.extent.batch * args.extent.space);
  const int64_t streams = args.residual.data == nullptr ? 2 : 3;
  const Scratch<Combination<opmath_t>> combinations(args.extent.channels);
  visit(args.activation, args.residual, [&](auto act, auto with_residual) {
    for_each_channel_group<scalar_t>(args.extent, streams, [&](const Extent& extent, int64_t c) {
      const Streams<scalar_t> io{{from_channel(args.z, c), from_channel(args.dz, c), from_channel(args.residual, c)},
                                 {from_channel(args.dx, c), from_channel(args.dresidual, c)}};
      const auto affine = from_channel(args.affine, c);
      const StoreCombination<scalar_t> finish{
          affine, from_channel(args.var, c), from_channel(args.dweight, c), from_channel(args.dbias, c), args.training,
          count,  combinations.data() + c};
      if (sums_needed) {
        reduce(extent, Reduce<scalar_t, decltype(act), with_residual(), false>{affine, act},
               {{io.in[0], io.in[1], io.in[2]}, {}}, finish);
      } else {
        finish_channels_of<Sums>(nullptr, 0, extent.channels, finish);
      }
      if (writes)
        apply(extent, InvertAndCombine<scalar_t, decltype(act), with_residual()>{combinations.data() + c, act}, io);
    });
  });
}

#define INSTANTIATE(scalar_t)                                         \
  template void backward_reduce(const BackwardReduceArgs<scalar_t>&); \
  template void backward(const BackwardArgs<scalar_t>&);              \
  template void local_backward(const LocalBackwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
