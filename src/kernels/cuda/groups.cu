// Statistics that neighbouring channels have in common. A block has one group of channels at a time.
#include "inplace_abn/kernels.h"
#include "launch.cuh"
#include "reduction.cuh"

namespace inplace_abn::cuda {
namespace {

constexpr int group_threads = 64;

template <typename scalar_t>
__global__ void __launch_bounds__(group_threads)
    merge_kernel(const int64_t first_block, const StatisticsArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  __shared__ Totals memory[group_threads];
  const int64_t shared = args.extent.shared, first = (first_block + blockIdx.x) * shared;
  const auto pivot = static_cast<double>(args.mean[first]);
  Totals own{};
  for (int64_t c = first + threadIdx.x; c < first + shared; c += group_threads) {
    const double shift = static_cast<double>(args.mean[c]) - pivot;
    own.add({shift, static_cast<double>(args.var[c]) + shift * shift});
  }
  // All threads have read the statistics once the sum is known.
  const Moments group = moments(sum_of_block<group_threads>(own, memory), pivot, static_cast<double>(shared));
  for (int64_t c = first + threadIdx.x; c < first + shared; c += group_threads) {
    args.mean[c] = static_cast<opmath_t>(group.mean);
    args.var[c] = static_cast<opmath_t>(group.var);
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(group_threads)
    share_kernel(const int64_t first_block, const ShareArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  __shared__ Totals memory[group_threads];
  const int64_t shared = args.extent.shared, first = (first_block + blockIdx.x) * shared;
  const auto count = static_cast<double>(shared * args.extent.batch * args.extent.space);
  Totals own{};
  for (int64_t c = first + threadIdx.x; c < first + shared; c += group_threads) {
    const auto sum_dy = static_cast<double>(args.sum_dy[c]), sum_xhat_dy = static_cast<double>(args.sum_xhat_dy[c]);
    const auto gamma = static_cast<double>(args.affine.gamma(c));
    own.add({gamma * sum_dy, gamma * sum_xhat_dy});
    if (args.dweight) args.dweight.store(c, sum_xhat_dy * static_cast<double>(args.affine.dgamma(c)));
    if (args.dbias) args.dbias.store(c, sum_dy);
  }
  const Totals sums = sum_of_block<group_threads>(own, memory);
  for (int64_t c = first + threadIdx.x; c < first + shared; c += group_threads) {
    args.sum_dy[c] = static_cast<opmath_t>(sums.first / count);
    args.sum_xhat_dy[c] = static_cast<opmath_t>(sums.second / count);
  }
}

}  // namespace

template <typename scalar_t>
void group_statistics(const StatisticsArgs<scalar_t>& args) {
  statistics(args);
  launch(merge_kernel<scalar_t>, args.extent.channels / args.extent.shared, group_threads, args);
}

template <typename scalar_t>
void share_sums(const ShareArgs<scalar_t>& args) {
  launch(share_kernel<scalar_t>, args.extent.channels / args.extent.shared, group_threads, args);
}

#define INSTANTIATE(scalar_t)                                      \
  template void group_statistics(const StatisticsArgs<scalar_t>&); \
  template void share_sums(const ShareArgs<scalar_t>&);
INPLACE_ABN_FOR_ALL_TYPES(INSTANTIATE)

}  // namespace inplace_abn::cuda
