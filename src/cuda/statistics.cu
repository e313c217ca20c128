#include "inplace_abn/kernels.h"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

// A thread's tile is centred on its own mean before it is squared, and tiles are merged by Chan's formula: the digits
// of the variance survive however far the mean is from zero.
template <typename scalar_type>
struct Statistics {
  using scalar_t = scalar_type;
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr int inputs = 1, outputs = 0, needed_outputs = 0;
  static constexpr int unroll = 4;
  static constexpr bool at_once = true, reduces = true, much_arithmetic = false;
  template <typename T>
  using Value = Moments<T>;
  struct Channel {};

  __device__ Channel channel(int64_t) const { return {}; }

  template <int items, int width>
  __device__ __forceinline__ void tile(const Channel&, const Elements<scalar_t, inputs, items * width>& in,
                                       Elements<scalar_t, outputs, items * width>&, Value<opmath_t>& value,
                                       const Tile<opmath_t, items, width>& tile) const {
    const auto for_each = [&](const auto& f) {
#pragma unroll
      for (int e = 0; e < items * width; ++e) {
        if (tile.has(e)) f(static_cast<opmath_t>(in[0][e]));
      }
    };
    opmath_t sum = 0, deviation = 0, square = 0;
    for_each([&](opmath_t x) { sum += x; });
    const opmath_t mean = sum * tile.inverse_count;
    for_each([&](opmath_t x) {
      const opmath_t d = x - mean;
      deviation += d;
      square += d * d;
    });
    // Rounding leaves the mean a little off; its correction is exact to first order.
    const opmath_t correction = deviation * tile.inverse_count, m2 = square - deviation * correction;
    value.merge({mean + correction, m2 < 0 ? opmath_t(0) : m2}, tile.shares);
  }
};

INPLACE_ABN_INLINE double variance(const Partial<Moments, double>& partial) {
  return partial.count == 0 ? 0 : partial.value.m2 / partial.count;
}

template <typename scalar_t>
struct StoreMoments {
  at::opmath_type<scalar_t>*mean, *var;
  RunningUpdate<scalar_t> running;
  double count;

  __device__ void operator()(int64_t c, const Partial<Moments, double>& partial) const {
    const double batch_mean = partial.value.mean, batch_var = variance(partial);
    mean[c] = static_cast<at::opmath_type<scalar_t>>(batch_mean);
    var[c] = static_cast<at::opmath_type<scalar_t>>(batch_var);
    running.apply(c, batch_mean, batch_var, count);
  }
};

template <typename scalar_t>
__global__ void __launch_bounds__(block_threads)
    combine_kernel(const int64_t first_block, const CombineArgs<scalar_t> args) {
  using opmath_t = at::opmath_type<scalar_t>;
  const int64_t row = 2 * args.channels + 1, c = (first_block + blockIdx.x) * blockDim.x + threadIdx.x;
  if (c == 0) {
    double count = 0;
    for (int64_t i = 0; i < args.parts; ++i) count += static_cast<double>(args.gathered[i * row + row - 1]);
    *args.count = static_cast<opmath_t>(count);
  }
  if (c < args.channels) {
    Partial<Moments, double> merged{};
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
void reduce_moments(const Extent& extent, const View<const scalar_t>& x, at::opmath_type<scalar_t>* mean,
                    at::opmath_type<scalar_t>* var, const RunningUpdate<scalar_t>& running) {
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

#define INSTANTIATE(scalar_t)                                                                          \
  template void reduce_moments(const Extent&, const View<const scalar_t>&, at::opmath_type<scalar_t>*, \
                               at::opmath_type<scalar_t>*, const RunningUpdate<scalar_t>&);            \
  template void statistics(const StatisticsArgs<scalar_t>&);                                           \
  template void combine(const CombineArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
