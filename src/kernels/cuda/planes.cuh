// Plane order: the kernel, and how its launch is partitioned (partition.h says in which terms).
#pragma once

#include "elements.cuh"
#include "partition.h"

namespace inplace_abn::cuda {

// The totals of all threads of a block, in thread 0. All threads call it, once in a kernel.
template <typename Op>
__device__ __forceinline__ Totals merge_block(const typename Op::Channel& channel, typename Op::Sum sum,
                                              typename Op::opmath_t count) {
  constexpr int most_warps = block_threads / 32;
  __shared__ typename Op::Sum sums[most_warps];
  __shared__ typename Op::opmath_t counts[most_warps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  sum.share_pivot(count);
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum.add(sum.shuffled_down(lanes));
    count += __shfl_down_sync(~0u, count, lanes);
  }
  if (lane == 0) {
    sums[warp] = sum;
    counts[warp] = count;
  }
  __syncthreads();
  if (warp != 0) return {};
  Totals totals = lane < warps ? Op::totals(channel, sums[lane], counts[lane]) : Totals{};
  for (int lanes = most_warps / 2; lanes > 0; lanes /= 2) totals.add(totals.shuffled_down(lanes));
  return totals;
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

// Where the items of channel c lie. If planes are `even`, each is a whole number of vectors, all tensors have the same
// batch stride, and 32 bits suffice to count: half of the instructions of an item would be spent on its address else.
template <typename Op, int width, bool even>
struct ChannelPlanes {
  using scalar_t = typename Op::scalar_t;
  using Index = std::conditional_t<even, int32_t, int64_t>;
  const Streams<scalar_t>& io;
  const PlanePartition& p;
  int64_t c;

  // The index in its plane of an item's first element.
  __device__ __forceinline__ int64_t first(const Items<Index>& at) const {
    if constexpr (even) {
      return static_cast<int64_t>(at.slots) * width;
    } else {
      return p.first_element<width>(at, at.planes * io.in[0].batch_stride + c * io.in[0].channel_stride);
    }
  }
  __device__ __forceinline__ Mask inside(const Items<Index>& at) const {
    if constexpr (even) {
      return all_elements<width>;
    } else {
      return elements_inside<width>(first(at), p.space);
    }
  }
  __device__ __forceinline__ auto locate(const Items<Index>& at) const {
    const int64_t element = first(at);
    return [this, at, element](const auto& view) {
      const int64_t stride = even ? static_cast<int32_t>(p.plane_stride) : view.batch_stride;
      return view.data + c * view.channel_stride + (at.planes * stride + element);
    };
  }
  __device__ __forceinline__ void load(const Items<Index>& at, Mask mask, Item<scalar_t, width, Op::inputs>& in) const {
    if constexpr (even) {
      if (mask != 0) cuda::load<Op, width>(io, locate(at), in);
    } else {
      load_part<Op, width>(io, locate(at), mask, in);
    }
  }
  __device__ __forceinline__ void store(const Items<Index>& at, Mask mask,
                                        const Item<scalar_t, width, Op::outputs>& out) const {
    if constexpr (even) {
      cuda::store<Op, width>(io, locate(at), out);
    } else {
      store_part<Op, width>(io, locate(at), mask, out);
    }
  }
};

template <typename Op, int width, bool even>
__global__ void __launch_bounds__(block_threads, resident<Op, 1>)
    planes_kernel(const int64_t first_block, const Op op, const Streams<typename Op::scalar_t> io,
                  const PlanePartition p, Totals* const shares) {
  using scalar_t = typename Op::scalar_t;
  using opmath_t = typename Op::opmath_t;
  using Planes = ChannelPlanes<Op, width, even>;
  using Index = typename Planes::Index;
  constexpr int unroll = Op::unroll, together = Op::at_once ? unroll : 1;
  static_assert(together == 1 || Op::outputs == 0);
  // A second pass goes backward: what the first pass read last is still in the cache.
  const int64_t block = first_block + blockIdx.x, unit = Op::reduces ? block : p.channels * p.parts - 1 - block;
  const int64_t c = quotient(unit, p.parts), part = unit - c * p.parts;
  const auto channel = op.channel(c);
  const Planes planes{io, p, c};
  const auto items = static_cast<Index>(p.items), slots = static_cast<Index>(p.slots);
  const auto stride = static_cast<Index>(p.parts * p.tile);
  const auto next_item = p.next_item.template as<Index>(), next_tile = p.next_tile.template as<Index>();
  typename Op::Sum sum{};
  opmath_t count = 0;
  auto item = static_cast<Index>(part * p.tile + threadIdx.x);
  auto cursor = p.at(item).template as<Index>();
  for (; item < items; item += stride) {
    Item<scalar_t, width, Op::inputs> in[unroll];
    Mask mask[unroll];
    const Items<Index> start = cursor;
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      mask[u] = item + u * p.threads < items ? planes.inside(cursor) : 0;
      planes.load(cursor, mask[u], in[u]);
      cursor.advance(next_item, slots);
    }
    if constexpr (Op::outputs > 0) cursor = start;
#pragma unroll
    for (int u = 0; u < unroll; u += together) {
      const Tile<together, width> tile{mask + u, count == 0};
      if (tile.elements() > 0) {
        Item<scalar_t, width, Op::outputs> out[together] = {};
        take<together, width, width>(op, channel, in + u, out, 0, sum, tile);
        count += static_cast<opmath_t>(tile.elements());
        planes.store(cursor, mask[u], out[0]);
      }
      if constexpr (Op::outputs > 0) cursor.advance(next_item, slots);
    }
    cursor.advance(next_tile, slots);
  }
  if constexpr (Op::reduces) {
    const Totals merged = merge_block<Op>(channel, sum, count);
    if (threadIdx.x == 0) leave(op, c, merged, shares, part, p.channels);
  }
}

// How the planes of all tensors of a call lie to multiples of 16 bytes.
struct PlaneAlignment {
  bool agree;      // equally, plane by plane, with room for a vector
  bool aligned;    // all planes start at one
  bool even;       // and are whole vectors, with one batch stride for all tensors
  int64_t phase;   // elements by which the first plane is past one
  int64_t stride;  // from plane to plane of a channel
};

template <int width, typename scalar_t>
PlaneAlignment align_planes(const Extent& extent, const Streams<scalar_t>& io) {
  struct Offsets {
    int64_t data, batch, channel;
    bool operator==(const Offsets&) const = default;
  };
  const auto offsets = [&](const auto& view) {
    const auto address = reinterpret_cast<uintptr_t>(view.data) / sizeof(scalar_t);
    return Offsets{static_cast<int64_t>(address % width), extent.batch == 1 ? 0 : view.batch_stride % width,
                   extent.channels == 1 ? 0 : view.channel_stride % width};
  };
  const Offsets first = offsets(io.in[0]);
  const int64_t stride = extent.batch == 1 ? 0 : io.in[0].batch_stride;
  bool agree = extent.space >= width, same_stride = true;
  for_each_view(io, [&](const auto& view) {
    agree = agree && offsets(view) == first;
    same_stride = same_stride && (extent.batch == 1 || view.batch_stride == stride);
  });
  const bool aligned = agree && first == Offsets{0, 0, 0};
  return {agree, aligned, aligned && same_stride && extent.space % width == 0, first.data, stride};
}

// Calls f(kernel, partition, io) with the kernel of the width in which all tensors can be accessed.
template <typename Op, typename F>
void visit_planes(const Extent& extent, const Streams<typename Op::scalar_t>& io, const F& f) {
  constexpr int width = vector_width<typename Op::scalar_t>;
  const PlaneAlignment alignment = align_planes<width>(extent, io);
  const int64_t resident_now = residency<Op, 1>();
  if (!alignment.agree) {
    f(planes_kernel<Op, 1, false>,
      partition_planes(extent, 1, Op::unroll, 0, true, alignment.stride, Op::reduces, resident_now), io);
    return;
  }
  const PlanePartition p = partition_planes(extent, width, Op::unroll, alignment.phase, alignment.aligned,
                                            alignment.stride, Op::reduces, resident_now);
  if (alignment.even && p.fits_32_bits()) {
    f(planes_kernel<Op, width, true>, p, io);
  } else {
    f(planes_kernel<Op, width, false>, p, io);
  }
}

}  // namespace inplace_abn::cuda
