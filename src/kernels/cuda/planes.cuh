// Plane order: the kernel, and how its launch is partitioned (partition.h says in which terms).
#pragma once

#include "elements.cuh"
#include "partition.h"

namespace inplace_abn::cuda {

// The merged result of all threads of the block, in thread 0. All threads call it, once in a kernel.
template <typename P>
__device__ P merge_block(P partial) {
  constexpr int most_warps = block_threads / 32;
  __shared__ P shared[most_warps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int lanes = 16; lanes > 0; lanes /= 2) partial.merge(partial.shuffled_down(lanes));
  if (lane == 0) shared[warp] = partial;
  __syncthreads();
  if (warp != 0) return partial;
  partial = lane < warps ? shared[lane] : P{};
  for (int lanes = most_warps / 2; lanes > 0; lanes /= 2) partial.merge(partial.shuffled_down(lanes));
  return partial;
}

// Which of the `width` elements from `first` are in a plane of `space`.
template <int width>
__device__ __forceinline__ Mask elements_inside(int64_t first, int64_t space) {
  Mask mask = all_elements<width>;
  if constexpr (width > 1) {
    if (first < 0) mask &= mask << -first;
    const int64_t left = space - first;
    if (left < width) mask &= (Mask(1) << (left < 0 ? 0 : left)) - 1;
  }
  return mask;
}

template <typename Op, int width>
__global__ void __launch_bounds__(block_threads, resident<Op, 1>)
    planes_kernel(const int64_t first_block, const Op op, const Streams<typename Op::scalar_t> io,
                  const PlanePartition p, ChannelPartial<Op>* const partials) {
  using scalar_t = typename Op::scalar_t;
  using opmath_t = typename Op::opmath_t;
  constexpr int unroll = Op::unroll, together = Op::at_once ? unroll : 1;
  static_assert(together == 1 || Op::outputs == 0);
  // A second pass goes backward: what the first pass read last is still in the cache.
  const int64_t block = first_block + blockIdx.x, unit = Op::reduces ? block : p.channels * p.parts - 1 - block;
  const int64_t c = quotient(unit, p.parts), part = unit - c * p.parts;
  const auto channel = op.channel(c);
  const auto first_element = [&](const Cursor& cursor) {
    return p.first_element<width>(cursor, cursor.plane * io.in[0].batch_stride + c * io.in[0].channel_stride);
  };
  typename Op::template Sum<opmath_t> sum{};
  opmath_t count = 0;
  int64_t item = part * p.tile + threadIdx.x;
  Cursor cursor = p.at(item);
  for (; item < p.items; item += p.parts * p.tile) {
    const Cursor start = cursor;
    Item<scalar_t, width, Op::inputs> in[unroll];
    Mask mask[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const int64_t first = first_element(cursor);
      mask[u] = item + u * p.threads < p.items ? elements_inside<width>(first, p.space) : 0;
      load<Op, width>(io, cursor.plane, c, first, mask[u], in[u]);
      cursor.advance(p.next_item, p.slots);
    }
    cursor = start;
#pragma unroll
    for (int u = 0; u < unroll; u += together) {
      const Tile<together, width> tile{mask + u, count == 0};
      if (tile.elements() > 0) {
        Item<scalar_t, width, Op::outputs> out[together] = {};
        take<together, width, width>(op, channel, in + u, out, 0, sum, tile);
        count += static_cast<opmath_t>(tile.elements());
        store<Op, width>(io, cursor.plane, c, first_element(cursor), mask[u], out[0]);
      }
#pragma unroll
      for (int i = 0; i < together; ++i) cursor.advance(p.next_item, p.slots);
    }
    cursor.advance(p.next_tile, p.slots);
  }
  if constexpr (Op::reduces) {
    const ChannelPartial<Op> merged = merge_block(ChannelPartial<Op>{static_cast<double>(count), sum.result(count)});
    if (threadIdx.x == 0) partials[part * p.channels + c] = merged;
  }
}

// Calls f(kernel, partition) with the kernel of the width in which all tensors can be accessed: by vectors, where they
// all are equally far past a multiple of 16 bytes, plane by plane, and planes have room for a vector.
template <typename Op, typename F>
void visit_planes(const Extent& extent, const Streams<typename Op::scalar_t>& io, const F& f) {
  constexpr int width = vector_width<typename Op::scalar_t>;
  struct Offsets {
    int64_t data, batch, channel;
    bool operator==(const Offsets&) const = default;
  };
  const auto offsets = [&](const auto& view) {
    const auto address = reinterpret_cast<uintptr_t>(view.data) / sizeof(typename Op::scalar_t);
    return Offsets{static_cast<int64_t>(address % width), extent.batch == 1 ? 0 : view.batch_stride % width,
                   extent.channels == 1 ? 0 : view.channel_stride % width};
  };
  const Offsets first = offsets(io.in[0]);
  bool agree = extent.space >= width;
  for_each_view(io, [&](const auto& view) { agree = agree && offsets(view) == first; });
  if (agree) {
    const bool even = first == Offsets{0, 0, 0};
    f(planes_kernel<Op, width>, partition_planes(extent, width, Op::unroll, first.data, even, current_device()));
  } else {
    f(planes_kernel<Op, 1>, partition_planes(extent, 1, Op::unroll, 0, true, current_device()));
  }
}

}  // namespace inplace_abn::cuda
