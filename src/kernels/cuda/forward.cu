#include "inplace_abn/kernels.h"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

// z = act((x - mean) * scale + beta + residual): the mean goes first, so that a large one costs no digits.
template <typename scalar_type, typename Act, bool with_residual>
struct Transform {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = with_residual ? 2 : 1, outputs = 1, needed_outputs = 1;
  static constexpr int unroll = 4 / inputs;
  static constexpr bool at_once = false, reduces = false, much_arithmetic = heavy<Act>;
  template <typename T>
  using Value = NoValue<T>;
  template <typename T>
  using Sum = NoValue<T>;
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
                                       Elements<scalar_t, outputs, items * width>& out, Sum<opmath_t>&,
                                       const Tile<items, width>&) const {
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      opmath_t y = (static_cast<opmath_t>(in[0][e]) - channel.mean) * channel.scale + channel.beta;
      if constexpr (with_residual) y += static_cast<opmath_t>(in[1][e]);
      out[0][e] = act.forward(y);
    }
  }
};

template <typename scalar_t>
void transform(const ForwardArgs<scalar_t>& args) {
  visit_forward<scalar_t>(args.activation.kind, args.activation.param, args.invertible, [&](auto act) {
    const Streams<scalar_t> io{{args.x, args.residual}, {args.z}};
    if (args.residual.data == nullptr) {
      apply(args.extent, Transform<scalar_t, decltype(act), false>{args.mean, args.var, args.affine, act}, io);
    } else {
      apply(args.extent, Transform<scalar_t, decltype(act), true>{args.mean, args.var, args.affine, act}, io);
    }
  });
}

}  // namespace

template <typename scalar_t>
void forward(const ForwardArgs<scalar_t>& args) {
  transform(args);
}

template <typename scalar_t>
void local_forward(const LocalForwardArgs<scalar_t>& args) {
  const int64_t streams = args.residual.data == nullptr ? 1 : 2;
  for_each_channel_group<scalar_t>(args.extent, streams, [&](const Extent& extent, int64_t c) {
    const auto x = from_channel(args.x, c);
    auto *mean = args.mean + c, *var = args.var + c;
    reduce_moments(extent, x, mean, var, from_channel(args.running, c));
    transform(ForwardArgs<scalar_t>{extent,
                                    x,
                                    from_channel(args.z, c),
                                    {mean, false},
                                    {var, false},
                                    from_channel(args.affine, c),
                                    args.activation,
                                    args.invertible,
                                    from_channel(args.residual, c)});
  });
}

#define INSTANTIATE(scalar_t)                          \
  template void forward(const ForwardArgs<scalar_t>&); \
  template void local_forward(const LocalForwardArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
