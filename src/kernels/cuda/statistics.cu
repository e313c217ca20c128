#include "inplace_abn/kernels.h"
#include "statistics.cuh"
#include "walk.cuh"

namespace inplace_abn::cuda {
namespace {

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
    // About the mean of the first share that is not empty.
    double pivot = 0, count = 0;
    Totals totals{};
    for (int64_t i = 0; i < args.parts; ++i) {
      const opmath_t* part = args.gathered + i * row;
      const auto added = static_cast<double>(part[row - 1]), mean = static_cast<double>(part[c]);
      if (added == 0) continue;
      if (count == 0) pivot = mean;
      const double shift = mean - pivot;
      totals.add({added * shift, added * (static_cast<double>(part[args.channels + c]) + shift * shift)});
      count += added;
    }
    const Moments batch = moments(totals, pivot, count);
    args.mean[c] = static_cast<opmath_t>(batch.mean);
    args.var[c] = static_cast<opmath_t>(batch.var);
    args.running.apply(c, batch.mean, batch.var, count);
  }
}

}  // namespace

template <typename scalar_t>
void reduce_moments(const Extent& extent, const Statistics<scalar_t>& op) {
  reduce(extent, op, {{op.x}});
}

template <typename scalar_t>
void statistics(const StatisticsArgs<scalar_t>& args) {
  const auto count = static_cast<double>(args.extent.batch * args.extent.space);
  reduce_moments(args.extent, Statistics<scalar_t>{args.x, args.mean, args.var, {}, count});
}

template <typename scalar_t>
void combine(const CombineArgs<scalar_t>& args) {
  const int64_t blocks = std::max<int64_t>(1, ceil_div(args.channels, block_threads));
  launch(combine_kernel<scalar_t>, blocks, block_threads, args);
}

#define INSTANTIATE(scalar_t)                                               \
  template void reduce_moments(const Extent&, const Statistics<scalar_t>&); \
  template void statistics(const StatisticsArgs<scalar_t>&);                \
  template void combine(const CombineArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
