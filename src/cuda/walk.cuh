// How the CUDA kernels walk a tensor, and why so.
//
// All ops are bound by memory traffic. In units of one activation-sized transfer:
//
//   statistics       1   read x                        forward          2   read x; write z
//   backward_reduce  4   read z, dz; write xhat, dy    backward         3   read xhat, dy; write dx
//   local_forward    3   read x; read x, write z       (2 from device memory where the second read hits the cache)
//   local_backward   5   read z, dz; read z, dz, write dx: inverting z once more is cheaper than 2 more writes
//                        (3 from device memory where the second reads hit the cache)
//   a residual adds 1 to each pass that inverts or applies the activation, its gradient 1 to the last pass.
//
// There are two kernels, one per memory order, for any op. An op says what to do with an element, given its channel's
// values; the kernel brings elements in and out 16 bytes at a time where they lie so, one by one where they do not
// (ragged ends of planes, tensors sliced differently, channels that are no multiple of the vector).
//
//   grid        x only, one-dimensional: (parts of a channel) x channels, or slabs x columns of channels, see
//               partition.h. Few channels are cut into many parts, so that all multiprocessors work; many channels are
//               a block each.
//   block       up to 256 threads; at most 64 registers for types narrower than double, so that at least 4 blocks share
//               a multiprocessor (half of its threads or more).
//   loads       each thread first issues all loads of its `unroll` items: 4 for ops with one input, 2 for ops with two,
//               that is 64 bytes a thread or 64 KB a multiprocessor in flight. Plane order: a warp reads 512
//               consecutive bytes. Row order: rows of 16 to 512 bytes, as long as there are channels.
//   reductions  two stages: one partial result per block in scratch memory, merged in double by a small kernel. Neither
//               uses atomics, so results are the same in every run.
//   second pass the local ops go through the channels of a plane-ordered tensor group by group, each group small enough
//               to stay in the second-level cache between its two passes. Otherwise the second pass walks backward:
//               what the first pass read last is what the cache still holds.
//
// Outputs may be the memory of inputs (kernels.h). A thread loads its elements from all inputs before it stores any of
// their outputs, and no other thread touches these elements. Pointers are not `__restrict__`, and loads are plain,
// never through the read-only path (`__ldg`), which may not see stores of the same kernel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moments.cuh"
#include "partition.h"

namespace inplace_abn::cuda {

// --- Ops -------------------------------------------------------------------------------------------------------------

// An op declares
//   scalar_t, opmath_t
//   inputs                    tensors read
//   outputs, needed_outputs   tensors written; those past the needed ones may be null and then are not
//   unroll, together          items a thread has in flight, and how many of them it takes up at once
//   reduces, Value            whether, and to what, a channel is reduced
//   Channel, channel(c)       what an element needs to know of its channel
//   tile<items, width>(channel, in, out, value, taken)
//                             the work: `items` times `width` elements of one channel, of which only the items `taken`
//                             exist. `value` takes them up.
template <typename scalar_t>
struct Streams {
  View<const scalar_t> in[3];
  View<scalar_t> out[2];
};

// The elements of a thread's items, per stream.
template <typename scalar_t, int streams, int elements>
using Elements = scalar_t[streams == 0 ? 1 : streams][elements];

// Which items of a tile exist, at least one, and how they weigh against the `count` values seen so far, which is
// advanced.
template <typename opmath_t, int items>
struct Taken {
  bool item[items];
  opmath_t inverse_count;
  Shares<opmath_t> shares;

  // Items `at, at + 1, ...` of those that `exist`, with `each` values per item.
  template <int all>
  INPLACE_ABN_INLINE Taken(const bool (&exist)[all], int at, int each, opmath_t& count)
      : Taken(exist, at, static_cast<opmath_t>(each * how_many(exist, at)), count) {}

  template <int all>
  INPLACE_ABN_INLINE static int how_many(const bool (&exist)[all], int at) {
    int sum = 0;
    for (int i = 0; i < items; ++i) sum += exist[at + i] ? 1 : 0;
    return sum;
  }

 private:
  template <int all>
  INPLACE_ABN_INLINE Taken(const bool (&exist)[all], int at, opmath_t values, opmath_t& count)
      : inverse_count(1 / values), shares(count, values) {
    for (int i = 0; i < items; ++i) item[i] = exist[at + i];
    count += values;
  }
};

template <typename opmath_t>
struct NoValue {};

template <typename Op>
using ChannelPartial = Partial<Op::template Value, typename Op::opmath_t>;

// --- Memory access ---------------------------------------------------------------------------------------------------

template <typename scalar_t>
constexpr int vector_width = 16 / sizeof(scalar_t);

template <typename scalar_t>
INPLACE_ABN_INLINE scalar_t* locate(const View<scalar_t>& view, int64_t batch, int64_t channel, int64_t element) {
  return view.data + batch * view.batch_stride + channel * view.channel_stride + element;
}

// 16 bytes of elements. They stay packed, four registers, from the load to their use.
template <typename scalar_t>
struct alignas(16) Vector {
  static constexpr int width = vector_width<scalar_t>;
  uint32_t words[4];

  __device__ __forceinline__ scalar_t get(int i) const {
    scalar_t value;
    if constexpr (sizeof(scalar_t) == 2) {
      const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      memcpy(&value, &bits, sizeof(value));
    } else {
      memcpy(&value, words + i * (sizeof(scalar_t) / 4), sizeof(value));
    }
    return value;
  }
  __device__ __forceinline__ void set(int i, scalar_t value) {
    if constexpr (sizeof(scalar_t) == 2) {
      uint16_t bits;
      memcpy(&bits, &value, sizeof(value));
      const int shift = i % 2 * 16;
      words[i / 2] = (words[i / 2] & ~(0xffffu << shift)) | (static_cast<uint32_t>(bits) << shift);
    } else {
      memcpy(words + i * (sizeof(scalar_t) / 4), &value, sizeof(value));
    }
  }
};

// An item: one vector per stream.
template <typename scalar_t, int streams>
using Item = Vector<scalar_t>[streams == 0 ? 1 : streams];

template <typename Op>
__device__ __forceinline__ void load(const Streams<typename Op::scalar_t>& io, int64_t batch, int64_t channel,
                                     int64_t element, Item<typename Op::scalar_t, Op::inputs>& in) {
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) {
    const uint4 raw = *reinterpret_cast<const uint4*>(locate(io.in[k], batch, channel, element));
    in[k] = {{raw.x, raw.y, raw.z, raw.w}};
  }
}

template <typename Op>
__device__ __forceinline__ void store(const Streams<typename Op::scalar_t>& io, int64_t batch, int64_t channel,
                                      int64_t element, const Item<typename Op::scalar_t, Op::outputs>& out) {
#pragma unroll
  for (int k = 0; k < Op::outputs; ++k) {
    if (k >= Op::needed_outputs && io.out[k].data == nullptr) continue;
    const auto& words = out[k].words;
    *reinterpret_cast<uint4*>(locate(io.out[k], batch, channel, element)) = {words[0], words[1], words[2], words[3]};
  }
}

// Hands elements `at ... at + width - 1` of each of `items` items to the op.
template <int items, int width, typename Op>
__device__ __forceinline__ void take(const Op& op, const typename Op::Channel& channel,
                                     const Item<typename Op::scalar_t, Op::inputs>* in,
                                     Item<typename Op::scalar_t, Op::outputs>* out, int at,
                                     typename Op::template Value<typename Op::opmath_t>& value,
                                     const Taken<typename Op::opmath_t, items>& taken) {
  Elements<typename Op::scalar_t, Op::inputs, items * width> elements_in;
  Elements<typename Op::scalar_t, Op::outputs, items * width> elements_out;
#pragma unroll
  for (int e = 0; e < items * width; ++e) {
#pragma unroll
    for (int k = 0; k < Op::inputs; ++k) elements_in[k][e] = in[e / width][k].get(at + e % width);
  }
  op.template tile<items, width>(channel, elements_in, elements_out, value, taken);
#pragma unroll
  for (int e = 0; e < items * width; ++e) {
#pragma unroll
    for (int k = 0; k < Op::outputs; ++k) out[e / width][k].set(at + e % width, elements_out[k][e]);
  }
}

// Loads, hands over and stores one element.
template <typename Op>
__device__ __forceinline__ void take_element(const Op& op, const Streams<typename Op::scalar_t>& io, int64_t batch,
                                             int64_t channel, int64_t element, const typename Op::Channel& values,
                                             typename Op::template Value<typename Op::opmath_t>& value,
                                             const Taken<typename Op::opmath_t, 1>& taken) {
  Elements<typename Op::scalar_t, Op::inputs, 1> in;
  Elements<typename Op::scalar_t, Op::outputs, 1> out;
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) in[k][0] = *locate(io.in[k], batch, channel, element);
  op.template tile<1, 1>(values, in, out, value, taken);
#pragma unroll
  for (int k = 0; k < Op::outputs; ++k) {
    if (k < Op::needed_outputs || io.out[k].data != nullptr) *locate(io.out[k], batch, channel, element) = out[k][0];
  }
}

// --- Plane order -----------------------------------------------------------------------------------------------------

// The merged result of all threads, in thread 0. All threads call it, and synchronise before the next call.
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

// The least number of resident blocks, which bounds a kernel's registers.
template <typename Op>
constexpr int resident = sizeof(typename Op::opmath_t) == sizeof(double) ? 2 : 4;

template <typename Op>
__global__ void __launch_bounds__(block_threads, resident<Op>)
    planes_kernel(const int64_t first_block, const Op op, const Streams<typename Op::scalar_t> io,
                  const PlanePartition p, ChannelPartial<Op>* const partials) {
  using scalar_t = typename Op::scalar_t;
  using opmath_t = typename Op::opmath_t;
  constexpr int width = vector_width<scalar_t>, unroll = Op::unroll, together = Op::together;
  {
    const int64_t work = first_block + blockIdx.x;
    const int64_t unit = Op::reduces ? work : p.channels * p.parts - 1 - work;
    const int64_t c = quotient(unit, p.parts), part = unit - c * p.parts;
    const auto channel = op.channel(c);
    const auto plane_offset = [&](int64_t plane) {
      return plane * io.in[0].batch_stride + c * io.in[0].channel_stride;
    };
    typename Op::template Value<opmath_t> value{};
    opmath_t count = 0;
    int64_t item = part * p.tile + threadIdx.x;
    Cursor cursor = p.at(item);
    for (; item < p.items; item += p.parts * p.tile) {
      Item<scalar_t, Op::inputs> in[unroll];
      Item<scalar_t, Op::outputs> out[together] = {};
      const Cursor start = cursor;
      bool whole[unroll], ragged = false;
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        const int64_t begin = p.first_element<width>(cursor, plane_offset(cursor.plane));
        const bool exists = item + u * p.threads < p.items;
        whole[u] = exists && p.vectors && begin >= 0 && begin + width <= p.space;
        ragged |= exists && !whole[u];
        if (whole[u]) load<Op>(io, cursor.plane, c, begin, in[u]);
        cursor.advance(p.next_item, p.slots);
      }
      cursor = start;
#pragma unroll
      for (int u = 0; u < unroll; u += together) {
        if (Taken<opmath_t, together>::how_many(whole, u) > 0) {
          const Taken<opmath_t, together> taken(whole, u, width, count);
          take<together, width>(op, channel, in + u, out, 0, value, taken);
        }
#pragma unroll
        for (int i = 0; i < together; ++i) {
          const int64_t begin = p.first_element<width>(cursor, plane_offset(cursor.plane));
          if (whole[u + i]) store<Op>(io, cursor.plane, c, begin, out[i]);
          cursor.advance(p.next_item, p.slots);
        }
      }
      cursor.advance(p.next_tile, p.slots);
      if (!ragged) continue;
      cursor = start;
#pragma unroll 1
      for (int u = 0; u < unroll; ++u) {
        const int64_t begin = p.first_element<width>(cursor, plane_offset(cursor.plane)), end = begin + width;
        const bool done = p.vectors && begin >= 0 && end <= p.space;
        if (item + u * p.threads < p.items && !done) {
#pragma unroll 1
          for (int64_t i = begin < 0 ? 0 : begin; i < (end < p.space ? end : p.space); ++i) {
            const Taken<opmath_t, 1> taken({true}, 0, 1, count);
            take_element(op, io, cursor.plane, c, i, channel, value, taken);
          }
        }
        cursor.advance(p.next_item, p.slots);
      }
      cursor.advance(p.next_tile, p.slots);
    }
    if constexpr (Op::reduces) {
      const ChannelPartial<Op> merged = merge_block(ChannelPartial<Op>{count, value});
      if (threadIdx.x == 0) partials[part * p.channels + c] = merged;
    }
  }
}

// --- Row order -------------------------------------------------------------------------------------------------------

template <typename Op>
__global__ void __launch_bounds__(block_threads, 3)
    rows_kernel(const int64_t first_block, const Op op, const Streams<typename Op::scalar_t> io, const RowPartition p,
                ChannelPartial<Op>* const partials) {
  using scalar_t = typename Op::scalar_t;
  using opmath_t = typename Op::opmath_t;
  using Value = typename Op::template Value<opmath_t>;
  constexpr int width = vector_width<scalar_t>, unroll = Op::unroll, together = Op::together;
  const int x = threadIdx.x % p.width, y = threadIdx.x / p.width;
  {
    const int64_t work = first_block + blockIdx.x;
    const int64_t slab = quotient(work, p.columns), column = work - slab * p.columns;
    const int64_t c = (column * p.width + x) * width, left = p.channels - c;
    const int valid = left >= width ? width : left > 0 ? static_cast<int>(left) : 0;
    // Worked out once per channel, not once per thread.
    __shared__ typename Op::Channel shared_channels[most_columns * width];
    const int64_t column_start = column * p.width * width;
    for (int i = threadIdx.x; i < p.width * width; i += blockDim.x) {
      if (column_start + i < p.channels) shared_channels[i] = op.channel(column_start + i);
    }
    __syncthreads();
    typename Op::Channel channel[width];
#pragma unroll
    for (int v = 0; v < width; ++v) channel[v] = shared_channels[x * width + v];
    Value value[width] = {};
    opmath_t count = 0;
    // Threads past the last channel only take part in the synchronisation.
    const bool whole = p.vectors && valid == width;
    const int64_t rows_per_group = static_cast<int64_t>(p.height) * unroll;
    const auto first_row = [&](int64_t g) { return (Op::reduces ? g : p.groups - 1 - g) * rows_per_group + y; };
    for (int64_t g = slab; g < p.groups && whole; g += p.slabs) {
      const int64_t row = first_row(g);
      Item<scalar_t, Op::inputs> in[unroll];
      Item<scalar_t, Op::outputs> out[together] = {};
      bool exists[unroll];
#pragma unroll
      for (int u = 0; u < unroll; ++u) {
        exists[u] = row + u * p.height < p.rows;
        if (exists[u]) load<Op>(io, row + u * p.height, c, 0, in[u]);
      }
#pragma unroll
      for (int u = 0; u < unroll; u += together) {
        if (Taken<opmath_t, together>::how_many(exists, u) == 0) continue;
        const Taken<opmath_t, together> taken(exists, u, 1, count);
#pragma unroll
        for (int v = 0; v < width; ++v) take<together, 1>(op, channel[v], in + u, out, v, value[v], taken);
#pragma unroll
        for (int i = 0; i < together; ++i) {
          if (exists[u + i]) store<Op>(io, row + (u + i) * p.height, c, 0, out[i]);
        }
      }
    }
    for (int64_t g = slab; g < p.groups && !whole && valid > 0; g += p.slabs) {
      const int64_t end = first_row(g) + rows_per_group;
#pragma unroll 1
      for (int64_t row = first_row(g); row < end && row < p.rows; row += p.height) {
        const Taken<opmath_t, 1> taken({true}, 0, 1, count);
#pragma unroll
        for (int v = 0; v < width; ++v) {
          if (v < valid) take_element(op, io, row, c + v, 0, channel[v], value[v], taken);
        }
      }
    }
    if constexpr (Op::reduces) {
      __shared__ Value values[width][block_threads];
      __shared__ opmath_t counts[block_threads];
#pragma unroll
      for (int v = 0; v < width; ++v) values[v][threadIdx.x] = value[v];
      counts[threadIdx.x] = count;
      for (int half = p.first_half; half > 0; half /= 2) {
        __syncthreads();
        const int other = threadIdx.x + half * p.width;
        if (y >= half || y + half >= p.height || counts[other] == 0) continue;
        const Shares<opmath_t> shares(count, counts[other]);
        count += counts[other];
        counts[threadIdx.x] = count;
#pragma unroll
        for (int v = 0; v < width; ++v) {
          value[v].merge(values[v][other], shares);
          values[v][threadIdx.x] = value[v];
        }
      }
      if (y == 0) {
#pragma unroll
        for (int v = 0; v < width; ++v) {
          if (v < valid) partials[slab * p.channels + c + v] = {count, value[v]};
        }
      }
    }
  }
}

// --- Host ------------------------------------------------------------------------------------------------------------

// Calls f(view) for all tensors of a call that exist.
template <typename scalar_t, typename F>
void for_each_view(const Streams<scalar_t>& io, const F& f) {
  for (const auto& view : io.in) {
    if (view.data != nullptr) f(view);
  }
  for (const auto& view : io.out) {
    if (view.data != nullptr) f(view);
  }
}

template <typename Op>
PlanePartition partition_planes(const Extent& extent, const Streams<typename Op::scalar_t>& io, const Device& device) {
  constexpr int64_t width = vector_width<typename Op::scalar_t>;
  const auto past = [](int64_t elements) { return elements % width; };
  const auto address = [](const auto& view) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data) / sizeof(typename Op::scalar_t));
  };
  const auto& first = io.in[0];
  bool agree = true;
  for_each_view(io, [&](const auto& view) {
    agree = agree && past(address(view)) == past(address(first)) &&
            (extent.batch == 1 || past(view.batch_stride) == past(first.batch_stride)) &&
            (extent.channels == 1 || past(view.channel_stride) == past(first.channel_stride));
  });
  const bool even = past(address(first)) == 0 && (extent.batch == 1 || past(first.batch_stride) == 0) &&
                    (extent.channels == 1 || past(first.channel_stride) == 0);
  return partition_planes(extent, width, Op::unroll, agree ? past(address(first)) : -1, even, device);
}

template <typename Op>
RowPartition partition_rows(const Extent& extent, const Streams<typename Op::scalar_t>& io, const Device& device) {
  constexpr int64_t width = vector_width<typename Op::scalar_t>;
  bool vectors = true;
  for_each_view(io, [&](const auto& view) {
    vectors = vectors && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
              (extent.batch == 1 || view.batch_stride % width == 0);
  });
  return partition_rows(extent, width, Op::unroll, vectors, device);
}

// Runs an op that writes elements only.
template <typename Op>
void apply(const Extent& extent, const Op& op, const Streams<typename Op::scalar_t>& io) {
  static_assert(!Op::reduces);
  if (extent.elements() == 0) return;
  if (extent.order == Order::planes) {
    const auto p = partition_planes<Op>(extent, io, current_device());
    launch(planes_kernel<Op>, p.channels * p.parts, p.threads, op, io, p, nullptr);
  } else {
    const auto p = partition_rows<Op>(extent, io, current_device());
    launch(rows_kernel<Op>, p.columns * p.slabs, p.threads(), op, io, p, nullptr);
  }
}

// Runs an op that reduces each channel, and calls `finish(channel, partial)` on the device with the merged results,
// empty ones for an empty tensor.
template <typename Op, typename Finish>
void reduce(const Extent& extent, const Op& op, const Streams<typename Op::scalar_t>& io, const Finish& finish) {
  static_assert(Op::reduces);
  const auto run = [&](auto* kernel, const auto& partition, int64_t lines, int64_t parts, int threads) {
    const Scratch<ChannelPartial<Op>> partials(parts * extent.channels);
    launch(kernel, lines * parts, threads, op, io, partition, partials.data());
    finish_channels_of(partials.data(), parts, extent.channels, finish);
  };
  if (extent.elements() == 0) {
    finish_channels_of<Op::template Value, typename Op::opmath_t>(nullptr, 0, extent.channels, finish);
  } else if (extent.order == Order::planes) {
    const auto p = partition_planes<Op>(extent, io, current_device());
    run(planes_kernel<Op>, p, p.channels, p.parts, p.threads);
  } else {
    const auto p = partition_rows<Op>(extent, io, current_device());
    run(rows_kernel<Op>, p, p.columns, p.slabs, p.threads());
  }
}

// --- Channel groups --------------------------------------------------------------------------------------------------

template <typename scalar_t>
View<scalar_t> from_channel(const View<scalar_t>& view, int64_t c) {
  if (view.data == nullptr) return view;
  return {view.data + c * view.channel_stride, view.batch_stride, view.channel_stride};
}

template <typename T>
T* from_channel(T* values, int64_t c) {
  return values == nullptr ? nullptr : values + c;
}

template <typename scalar_t>
ChannelVector<scalar_t> from_channel(const ChannelVector<scalar_t>& vector, int64_t c) {
  if (!vector) return vector;
  const int64_t size = vector.narrow ? sizeof(scalar_t) : sizeof(at::opmath_type<scalar_t>);
  return {static_cast<char*>(vector.data) + c * size, vector.narrow};
}

template <typename scalar_t>
Affine<scalar_t> from_channel(const Affine<scalar_t>& affine, int64_t c) {
  return {from_channel(affine.weight, c), from_channel(affine.bias, c), affine.eps, affine.signed_weight};
}

template <typename scalar_t>
RunningUpdate<scalar_t> from_channel(const RunningUpdate<scalar_t>& running, int64_t c) {
  return {from_channel(running.mean, c), from_channel(running.var, c), running.momentum, running.momentum_tensor};
}

// Calls f(extent, first channel) for each group of channels that is to be reduced and applied before the next.
template <typename F>
void for_each_channel_group(const Extent& extent, int64_t bytes_per_element, const F& f) {
  if (extent.channels == 0) return;
  const int64_t step = channels_per_group(extent, bytes_per_element, current_device());
  for (int64_t first = 0; first < extent.channels; first += step) {
    f(Extent{extent.order, extent.batch, std::min(step, extent.channels - first), extent.space}, first);
  }
}

}  // namespace inplace_abn::cuda
