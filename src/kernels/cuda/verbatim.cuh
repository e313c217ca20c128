// Channels whose xhat is saved beside z: few, of whose memory order nothing is made. Several blocks share one.
#pragma once

#include <optional>

#include "launch.cuh"
#include "reduction.cuh"

namespace inplace_abn::cuda {

constexpr int verbatim_threads = 256;

// How saved rows are divided: `parts` blocks have one, and take its elements in turn.
struct VerbatimPartition {
  int64_t rows, parts;

  template <typename scalar_t>
  VerbatimPartition(const Verbatim<scalar_t>& verbatim, const Extent& extent)
      : rows(verbatim.channels == 0 ? 0 : extent.channels / verbatim.channels * verbatim.saved), parts(1) {
    constexpr int64_t least_elements = 8 * verbatim_threads, blocks_of_multiprocessor = 16;
    if (rows == 0) return;
    const int64_t most = std::max<int64_t>(1, multiprocessors() * blocks_of_multiprocessor / rows);
    parts = std::clamp<int64_t>(extent.batch * extent.space / least_elements, 1, most);
  }
};

// A block's row of those that are saved, and the channel that it is of, which all threads look for.
struct SavedRow {
  int64_t part, row, channel;

  template <typename scalar_t>
  __device__ SavedRow(const Verbatim<scalar_t>& verbatim, int64_t block, int64_t parts) {
    __shared__ int64_t found;
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    const int64_t of_call = block / parts, sample = of_call / verbatim.saved;
    part = block - of_call * parts;
    row = of_call - sample * verbatim.saved;
    for (int64_t c = threadIdx.x; c < verbatim.channels; c += verbatim_threads) {
      if (verbatim.rows[c] == row) found = c;
    }
    __syncthreads();
    channel = found < 0 ? -1 : sample * verbatim.channels + found;
    row = of_call + verbatim.first / verbatim.channels * verbatim.saved;
  }
};

// The place of a thread in a row of [batch, space], which goes on by the threads of all blocks of the row. Divides only
// at the start.
struct Place {
  int64_t plane, offset;
  const int64_t planes_on, offset_on, space;

  __device__ Place(const Extent& extent, int64_t part, int64_t parts)
      : Place(extent, part * verbatim_threads + threadIdx.x, parts * verbatim_threads, extent.space) {}

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

 private:
  __device__ Place(const Extent& extent, int64_t start, int64_t step, int64_t space)
      : plane(space == 0 ? extent.batch : quotient(start, space)),
        offset(start - plane * space),
        planes_on(space == 0 ? 0 : quotient(step, space)),
        offset_on(step - planes_on * space),
        space(space) {}
};

// Saves xhat of x.
template <typename scalar_t>
__global__ void __launch_bounds__(verbatim_threads)
    standardise_kernel(const int64_t first_block, const ForwardArgs<scalar_t> args, const int64_t parts) {
  using opmath_t = opmath_type<scalar_t>;
  const SavedRow saved(args.verbatim, first_block + blockIdx.x, parts);
  const int64_t c = saved.channel;
  if (c < 0) return;
  const opmath_t mean = args.mean.load(c), inv_std = args.affine.inv_std(args.var.load(c));
  for (Place at(args.extent, saved.part, parts); at.plane < args.extent.batch; at.go_on()) {
    const auto x = static_cast<opmath_t>(at.in(args.x, c));
    at.in(args.verbatim.xhat, saved.row) = static_cast<scalar_t>((x - mean) * inv_std);
  }
}

template <typename scalar_t, typename Act>
__global__ void __launch_bounds__(verbatim_threads)
    differentiate_kernel(const int64_t first_block, const VerbatimGradientArgs<scalar_t> args, const int64_t parts,
                         const Act act) {
  using opmath_t = opmath_type<scalar_t>;
  const SavedRow saved(args.verbatim, first_block + blockIdx.x, parts);
  const int64_t c = saved.channel;
  if (c < 0) return;
  const opmath_t gamma = args.affine.gamma(c), beta = args.affine.beta(c);
  for (Place at(args.extent, saved.part, parts); at.plane < args.extent.batch; at.go_on()) {
    opmath_t y = gamma * static_cast<opmath_t>(at.in(args.verbatim.xhat, saved.row)) + beta;
    if (args.residual.data != nullptr) y += static_cast<opmath_t>(at.in(args.residual, c));
    const auto dz = static_cast<opmath_t>(at.in(args.dz, c));
    at.in(args.dy, saved.row) = static_cast<scalar_t>(dz * act.slope(y));
  }
}

// What a block has summed up of the channel.
struct VerbatimShare {
  Totals totals;
  int64_t channel;
};

template <typename scalar_t>
__device__ void store_sums(const BackwardReduceArgs<scalar_t>& args, const VerbatimShare& share) {
  using opmath_t = opmath_type<scalar_t>;
  args.sum_dy[share.channel] = static_cast<opmath_t>(share.totals.first);
  args.sum_xhat_dy[share.channel] = static_cast<opmath_t>(share.totals.second);
}

// Puts the saved xhat, and dy if it is known, where they were recovered, and sums them.
template <typename scalar_t>
__global__ void __launch_bounds__(verbatim_threads)
    replace_kernel(const int64_t first_block, const BackwardReduceArgs<scalar_t> args, const int64_t parts,
                   VerbatimShare* const shares) {
  using opmath_t = opmath_type<scalar_t>;
  __shared__ Totals memory[verbatim_threads];
  const SavedRow saved(args.verbatim, first_block + blockIdx.x, parts);
  const int64_t c = saved.channel;
  Totals own{};
  for (Place at(args.extent, saved.part, parts); c >= 0 && at.plane < args.extent.batch; at.go_on()) {
    const scalar_t xhat = at.in(args.verbatim.xhat, saved.row);
    scalar_t& stored = at.in(args.dy, c);
    if (args.verbatim.dy.data != nullptr) stored = at.in(args.verbatim.dy, saved.row);
    at.in(args.xhat, c) = xhat;
    const auto dy = static_cast<opmath_t>(stored);
    own.add({static_cast<double>(dy), static_cast<double>(static_cast<opmath_t>(xhat) * dy)});
  }
  const VerbatimShare share{sum_of_block<verbatim_threads>(own, memory), c};
  if (threadIdx.x != 0) return;
  if (shares != nullptr) {
    shares[first_block + blockIdx.x] = share;
  } else if (c >= 0) {
    store_sums(args, share);
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(verbatim_threads)
    replace_sums_kernel(const int64_t first_block, const BackwardReduceArgs<scalar_t> args, const int64_t parts,
                        const VerbatimShare* const shares) {
  __shared__ Totals memory[verbatim_threads];
  const VerbatimShare* const of_row = shares + (first_block + blockIdx.x) * parts;
  Totals own{};
  for (int64_t part = threadIdx.x; part < parts; part += verbatim_threads) own.add(of_row[part].totals);
  const VerbatimShare share{sum_of_block<verbatim_threads>(own, memory), of_row->channel};
  if (threadIdx.x == 0 && share.channel >= 0) store_sums(args, share);
}

template <typename scalar_t>
void save_verbatim(const ForwardArgs<scalar_t>& args) {
  if (!args.verbatim) return;
  const VerbatimPartition p(args.verbatim, args.extent);
  launch(standardise_kernel<scalar_t>, p.rows * p.parts, verbatim_threads, args, p.parts);
}

template <typename scalar_t>
void take_verbatim(const BackwardReduceArgs<scalar_t>& args) {
  if (!args.verbatim) return;
  const VerbatimPartition p(args.verbatim, args.extent);
  std::optional<Scratch<VerbatimShare>> memory;
  if (p.parts > 1) memory.emplace(p.rows * p.parts);
  VerbatimShare* const shares = memory ? memory->data() : nullptr;
  launch(replace_kernel<scalar_t>, p.rows * p.parts, verbatim_threads, args, p.parts, shares);
  if (memory) {
    const VerbatimShare* const left = shares;
    launch(replace_sums_kernel<scalar_t>, p.rows, verbatim_threads, args, p.parts, left);
  }
}

}  // namespace inplace_abn::cuda
