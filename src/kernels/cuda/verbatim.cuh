// Channels whose xhat is saved beside z. A block has one channel: these are few, so nothing else is made of them.
#pragma once

#include "launch.cuh"
#include "reduction.cuh"

namespace inplace_abn::cuda {

constexpr int verbatim_threads = 256;

// The place of a thread in a row of [batch, space], which goes on by the threads of a block. Divides only at the start.
struct Place {
  int64_t plane, offset;
  const int64_t planes_on, offset_on, space;

  __device__ explicit Place(const Extent& extent)
      : plane(extent.space == 0 ? extent.batch : threadIdx.x / extent.space),
        offset(threadIdx.x - plane * extent.space),
        planes_on(extent.space == 0 ? 0 : verbatim_threads / extent.space),
        offset_on(verbatim_threads - planes_on * extent.space),
        space(extent.space) {}

  __device__ __forceinline__ void go_on() {
    plane += planes_on;
    offset += offset_on;
    if (offset >= space) {
      offset -= space;
      ++plane;
    }
  }

  // The element of `row` of a view that lies here.
  template <typename scalar_t>
  __device__ __forceinline__ scalar_t& in(const View<scalar_t>& view, int64_t row) const {
    return view.data[plane * view.batch_stride + row * view.channel_stride + offset];
  }
};

// Saves xhat of x.
template <typename scalar_t>
__global__ void __launch_bounds__(verbatim_threads)
    standardise_kernel(const int64_t first_block, const ForwardArgs<scalar_t> args) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t c = first_block + blockIdx.x, row = args.verbatim.row(c);
  if (row < 0) return;
  const opmath_t mean = args.mean.load(c), inv_std = args.affine.inv_std(args.var.load(c));
  for (Place at(args.extent); at.plane < args.extent.batch; at.go_on()) {
    const auto x = static_cast<opmath_t>(at.in(args.x, c));
    at.in(args.verbatim.xhat, row) = static_cast<scalar_t>((x - mean) * inv_std);
  }
}

template <typename scalar_t, typename Act>
__global__ void __launch_bounds__(verbatim_threads)
    differentiate_kernel(const int64_t first_block, const VerbatimGradientArgs<scalar_t> args, const Act act) {
  using opmath_t = opmath_type<scalar_t>;
  const int64_t c = first_block + blockIdx.x, row = args.verbatim.row(c);
  if (row < 0) return;
  const opmath_t gamma = args.affine.gamma(c), beta = args.affine.beta(c);
  for (Place at(args.extent); at.plane < args.extent.batch; at.go_on()) {
    opmath_t y = gamma * static_cast<opmath_t>(at.in(args.verbatim.xhat, row)) + beta;
    if (args.residual.data != nullptr) y += static_cast<opmath_t>(at.in(args.residual, c));
    const auto dz = static_cast<opmath_t>(at.in(args.dz, c));
    at.in(args.dy, row) = static_cast<scalar_t>(dz * act.slope(y));
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
  for (Place at(args.extent); at.plane < args.extent.batch; at.go_on()) {
    const scalar_t xhat = at.in(args.verbatim.xhat, row);
    scalar_t& stored = at.in(args.dy, c);
    if (args.verbatim.dy.data != nullptr) stored = at.in(args.verbatim.dy, row);
    at.in(args.xhat, c) = xhat;
    const auto dy = static_cast<opmath_t>(stored);
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
