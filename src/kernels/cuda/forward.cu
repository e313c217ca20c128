#include "inplace_abn/kernels.h"
#include "statistics.cuh"
#include "verbatim.cuh"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

// z = act((x - mean) * scale + beta + residual). The mean is subtracted first, so that a large mean costs no digits.
template <typename scalar_type, typename Act, bool with_residual>
struct Transform {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = with_residual ? 2 : 1, outputs = 1, needed_outputs = 1;
  static constexpr int unroll = 4 / inputs;
  static constexpr bool at_once = false, reduces = false, much_arithmetic = heavy<Act>;
  using Sum = NoSum;
  struct Channel {
    opmath_t mean, scale, beta;
  };

  ChannelVector<scalar_t> mean, var;
  Affine<scalar_t> affine;
  Act act;

  __device__ Channel channel(int64_t c) const {
    return {mean.load(c), affine.gamma(c) * affine.inv_std(var.load(c)), affine.beta(c)};
  }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel& channel, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>& out, Sum&,
                                       const Tile<items, width>&) const {
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      opmath_t y = (static_cast<opmath_t>(in[0][e]) - channel.mean) * channel.scale + channel.beta;
      if constexpr (with_residual) y += static_cast<opmath_t>(in[1][e]);
      out[0][e] = static_cast<scalar_t>(act.value(y));
    }
  }
};

// Calls f(op, io) with the op that the arguments ask for.
template <typename scalar_t, typename F>
void visit_transform(const ForwardArgs<scalar_t>& args, const F& f) {
  visit_forward<scalar_t>(args.activation.kind, args.activation.param, args.invertible, [&](auto act) {
    const Streams<scalar_t> io{{args.x, args.residual}, {args.z}};
    if (args.residual.data == nullptr) {
      f(Transform<scalar_t, decltype(act), false>{args.mean, args.var, args.affine, act}, io);
    } else {
      f(Transform<scalar_t, decltype(act), true>{args.mean, args.var, args.affine, act}, io);
    }
  });
}

}  // namespace

template <typename scalar_t>
void forward(const ForwardArgs<scalar_t>& args) {
  save_verbatim(args);
  visit_transform(args, [&](const auto& op, const auto& io) { apply(args.extent, op, io); });
}

template <typename scalar_t>
void local_forward(const LocalForwardArgs<scalar_t>& args) {
  const auto count = static_cast<double>(args.extent.batch * args.extent.space);
  reduce_moments(args.extent, Statistics<scalar_t>{args.x, args.mean, args.var, args.running, count});
  const ForwardArgs<scalar_t> all{args.extent, args.x,          args.z,          {args.mean, false}, {args.var, false},
                                  args.affine, args.activation, args.invertible, args.residual,      args.verbatim};
  forward(all);
}

#define INSTANTIATE(scalar_t)                          \
  template void forward(const ForwardArgs<scalar_t>&); \
  template void local_forward(const LocalForwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
