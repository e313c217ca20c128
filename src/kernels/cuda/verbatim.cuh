// Channels whose xhat is saved beside z. A block has one channel: these are few, so nothing else is made of them.
#pragma once

#include "launch.cuh"
#include "reduction.cuh"

namespace inplace_abn::cuda {

constexpr int verbatim_threads = 256;

// Element `i` of `row` of a view.
template <typename scalar_t>
__device__ __forceinline__ scalar_t* element(const Extent& extent, const View<scalar_t>& view, int64_t row, int64_t i) {
  const int64_t plane = extent.space == 0 ? 0 : i / extent.space;
  return view.data + plane * view.batch_stride + row * view.channel_stride + (i - plane * extent.space);
}

// Saves xhat of x.
template <typename scalar_t>
__global__ void __launch_bounds__(verbatim_threads)
    standardise_kernel(const int64_t first_block, const ForwardArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t c = first_block + blockIdx.x, row = args.verbatim.row(c);
  if (row < 0) return;
  const opmath_t mean = args.mean.load(c), inv_std = args.affine.inv_std(args.var.load(c));
  for (int64_t i = threadIdx.x; i < args.extent.batch * args.extent.space; i += verbatim_threads) {
    const auto x = static_cast<opmath_t>(*element(args.extent, args.x, c, i));
    *element(args.extent, args.verbatim.xhat, row, i) = static_cast<scalar_t>((x - mean) * inv_std);
  }
}

template <typename scalar_t, typename Act>
__global__ void __launch_bounds__(verbatim_threads)
    differentiate_kernel(const int64_t first_block, const VerbatimGradientArgs<scalar_t> args, const Act act) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t c = first_block + blockIdx.x, row = args.verbatim.row(c);
  if (row < 0) return;
  const opmath_t gamma = args.affine.gamma(c), beta = args.affine.beta(c);
  for (int64_t i = threadIdx.x; i < args.extent.batch * args.extent.space; i += verbatim_threads) {
    opmath_t y = gamma * static_cast<opmath_t>(*element(args.extent, args.verbatim.xhat, row, i)) + beta;
    if (args.residual.data != nullptr) y += static_cast<opmath_t>(*element(args.extent, args.residual, c, i));
    const auto dz = static_cast<opmath_t>(*element(args.extent, args.dz, c, i));
    *element(args.extent, args.dy, row, i) = static_cast<scalar_t>(dz * act.slope(y));
  }
}

// Puts the saved xhat, and dy if it is known, where they were recovered, and sums them.
template <typename scalar_t>
__global__ void __launch_bounds__(verbatim_threads)
    replace_kernel(const int64_t first_block, const BackwardReduceArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  __shared__ Totals memory[verbatim_threads];
  const int64_t c = first_block + blockIdx.x, row = args.verbatim.row(c);
  if (row < 0) return;
  Totals own{};
  for (int64_t i = threadIdx.x; i < args.extent.batch * args.extent.space; i += verbatim_threads) {
    const scalar_t xhat = *element(args.extent, args.verbatim.xhat, row, i);
    scalar_t* const stored = element(args.extent, args.dy, c, i);
    if (args.verbatim.dy.data != nullptr) *stored = *element(args.extent, args.verbatim.dy, row, i);
    *element(args.extent, args.xhat, c, i) = xhat;
    const auto dy = static_cast<opmath_t>(*stored);
    own.add({static_cast<double>(dy), static_cast<double>(static_cast<opmath_t>(xhat) * dy)});
  }
  const Totals sums = sum_of_block<verbatim_threads>(own, memory);
  if (threadIdx.x != 0) return;
  args.sum_dy[c] = static_cast<opmath_t>(sums.first);
  args.sum_xhat_dy[c] = static_cast<opmath_t>(sums.second);
}

template <typename scalar_t>
void save_verbatim(const ForwardArgs<scalar_t>& args) {
  if (args.verbatim) launch(standardise_kernel<scalar_t>, args.extent.channels, verbatim_threads, args);
}

template <typename scalar_t>
void take_verbatim(const BackwardReduceArgs<scalar_t>& args) {
  if (args.verbatim) launch(replace_kernel<scalar_t>, args.extent.channels, verbatim_threads, args);
}

}  // namespace inplace_abn::cuda
