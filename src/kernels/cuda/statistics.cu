#include "inplace_abn/kernels.h"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

// Few instructions per element, for these are what bounds it in 16 bits.
template <typename scalar_type>
struct Statistics {
  using scalar_t = scalar_type;
  using opmath_t = opmath_type<scalar_t>;
  static constexpr int inputs = 1, outputs = 0, needed_outputs = 0;
  static constexpr int unroll = 4;
  static constexpr bool at_once = true, reduces = true, much_arithmetic = false;
  template <typename T>
  using Value = Moments<T>;
  template <typename T>
  using Sum = ShiftedSums<T>;
  struct Channel {};

  __device__ Channel channel(int64_t) const { return {}; }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel&, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>&, Sum<opmath_t>& sum,
                                       const Tile<items, width>& tile) const {
    if (tile.first) {
      opmath_t total = 0;
#pragma unroll
      for (int e = 0; e < items * width; ++e) total += tile.has(e) ? static_cast<opmath_t>(in[0][e]) : opmath_t(0);
      sum.pivot = total / static_cast<opmath_t>(tile.elements());
    }
#pragma unroll
    for (int e = 0; e < items * width; ++e) {
      if (tile.has(e)) sum.add(static_cast<opmath_t>(in[0][e]));
    }
  }
};

INPLACE_ABN_INLINE double variance(const Partial<Moments>& partial) {
  return partial.count == 0 ? 0 : partial.value.m2 / partial.count;
}

template <typename scalar_t>
struct StoreMoments {
  opmath_type<scalar_t>*mean, *var;
  RunningUpdate<scalar_t> running;
  double count;

  __device__ void operator()(int64_t c, const Partial<Moments>& partial) const {
    const double batch_mean = partial.value.mean, batch_var = variance(partial);
    mean[c] = static_cast<opmath_type<scalar_t>>(batch_mean);
    var[c] = static_cast<opmath_type<scalar_t>>(batch_var);
    running.apply(c, batch_mean, batch_var, count);
  }
};

template <typename scalar_t>
__global__ void __launch_bounds__(block_threads)
    combine_kernel(const int64_t first_block, const CombineArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t row = 2 * args.channels + 1, c = (first_block + blockIdx.x) * blockDim.x + threadIdx.x;
  if (c == 0) {
    double count = 0;
    for (int64_t i = 0; i < args.parts; ++i) count += static_cast<double>(args.gathered[i * row + row - 1]);
    *args.count = static_cast<opmath_t>(count);
  }
  if (c < args.channels) {
    Partial<Moments> merged{};
    for (int64_t i = 0; i < args.parts; ++i) {
      const opmath_t* part = args.gathered + i * row;
      const auto count = static_cast<double>(part[row - 1]);
      merged.merge({count, {static_cast<double>(part[c]), static_cast<double>(part[args.channels + c]) * count}});
    }
    args.mean[c] = static_cast<opmath_t>(merged.value.mean);
    args.var[c] = static_cast<opmath_t>(variance(merged));
    args.running.apply(c, merged.value.mean, variance(merged), merged.count);
  }
}

}  // namespace

template <typename scalar_t>
void reduce_moments(const Extent& extent, const View<const scalar_t>& x, opmath_type<scalar_t>* mean,
                    opmath_type<scalar_t>* var, const RunningUpdate<scalar_t>& running) {
  const auto count = static_cast<double>(extent.batch * extent.space);
  reduce(extent, Statistics<scalar_t>{}, {{x}}, StoreMoments<scalar_t>{mean, var, running, count});
}

template <typename scalar_t>
void statistics(const StatisticsArgs<scalar_t>& args) {
  reduce_moments(args.extent, args.x, args.mean, args.var, RunningUpdate<scalar_t>{});
}

template <typename scalar_t>
void combine(const CombineArgs<scalar_t>& args) {
  const int64_t blocks = std::max<int64_t>(1, ceil_div(args.channels, block_threads));
  launch(combine_kernel<scalar_t>, blocks, block_threads, args);
}

#define INSTANTIATE(scalar_t)                                                                      \
  template void reduce_moments(const Extent&, const View<const scalar_t>&, opmath_type<scalar_t>*, \
                               opmath_type<scalar_t>*, const RunningUpdate<scalar_t>&);            \
  template void statistics(const StatisticsArgs<scalar_t>&);                                       \
  template void combine(const CombineArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
