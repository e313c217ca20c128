// Row order: the kernel, and how its launch is partitioned (partition.h says in which terms).
#pragma once

#include <numeric>

#include "elements.cuh"
#include "partition.h"

namespace inplace_abn::cuda {

template <typename Op, int width>
__global__ void __launch_bounds__(block_threads, resident<Op, width>)
    rows_kernel(const int64_t first_block, const Op op, const Streams<typename Op::scalar_t> io, const RowPartition p,
                Totals* const shares) {
  using scalar_t = typename Op::scalar_t;
  using opmath_t = typename Op::opmath_t;
  constexpr int unroll = Op::unroll, together = Op::at_once ? unroll : 1;
  static_assert(together == 1 || Op::outputs == 0);
  const int x = threadIdx.x % p.width, y = threadIdx.x / p.width;
  const int64_t block = first_block + blockIdx.x, part = quotient(block, p.columns), column = block - part * p.columns;
  const int64_t column_start = column * p.width * width, e = column_start + x * width;
  // Threads past the last element only take part in the synchronisation.
  const bool inside = e < p.rows.length;

  __shared__ typename Op::Channel shared_channels[most_across(width) * width];
  typename Op::Channel channel[width] = {};
  typename Op::Sum sum[width] = {};
  opmath_t count = 0;
  for (int64_t g = part; g < p.groups; g += p.parts) {
    // A second pass goes backward: what the first pass read last is still in the cache.
    const int64_t row = (Op::reduces ? g : p.groups - 1 - g) * unroll * p.height + y;
    const auto locate = [&](int u) {
      return [&, u](const auto& view) { return view.data + (row + u * p.height) * view.batch_stride + e; };
    };
    Item<scalar_t, width, Op::inputs> in[unroll];
    Mask exists[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      exists[u] = inside && row + u * p.height < p.rows.count ? 1 : 0;
      if (exists[u] != 0) load<Op, width>(io, locate(u), in[u]);
    }
    if (g == part) {
      // Worked out once per element of the column, not once per thread, while the first elements are on their way.
      for (int i = threadIdx.x; i < p.width * width && column_start + i < p.rows.length; i += blockDim.x) {
        shared_channels[i] = op.channel(p.rows.channel(column_start + i));
      }
      __syncthreads();
#pragma unroll
      for (int v = 0; v < width; ++v) channel[v] = shared_channels[x * width + v];
    }
#pragma unroll
    for (int u = 0; u < unroll; u += together) {
      const Tile<together, 1> tile{exists + u, count == 0};
      if (tile.elements() == 0) continue;
      Item<scalar_t, width, Op::outputs> out[together] = {};
#pragma unroll
      for (int v = 0; v < width; ++v) take<together, 1, width>(op, channel[v], in + u, out, v, sum[v], tile);
      store<Op, width>(io, locate(u), out[0]);
      count += static_cast<opmath_t>(tile.elements());
    }
  }

  if constexpr (Op::reduces) {
    // Room for the upper half of the rows: on small multiprocessors it is shared memory that limits the blocks.
    __shared__ typename Op::Sum shared[width][block_threads / 2];
    __shared__ opmath_t counts[block_threads / 2];
    for (int half = p.first_half; half > 0; half /= 2) {
      if (y >= half && y < 2 * half) {
        const int place = threadIdx.x - half * p.width;
        counts[place] = count;
#pragma unroll
        for (int v = 0; v < width; ++v) shared[v][place] = sum[v];
      }
      __syncthreads();
      if (y < half && y + half < p.height) {
        const opmath_t others = counts[threadIdx.x];
#pragma unroll
        for (int v = 0; v < width; ++v) sum[v].merge(shared[v][threadIdx.x], count, others);
        count += others;
      }
      __syncthreads();
    }
    // Every thread finishes an element or so of the column, because places in it take divisions to find.
    if (y == 0) {
      counts[x] = count;
#pragma unroll
      for (int v = 0; v < width; ++v) shared[v][x] = sum[v];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.width * width && column_start + i < p.rows.length; i += blockDim.x) {
      const int64_t element = column_start + i, share = part * p.rows.repeats() + p.rows.repeat(element);
      const Totals totals = op.totals(shared_channels[i], shared[i % width][i / width], counts[i / width]);
      leave(op, p.rows.channel(element), totals, shares, share, p.rows.channels);
    }
  }
}

// Calls f(kernel, partition, io) for tensors whose rows, of all channels and their space, are consecutive memory: by
// vectors, where rows start at multiples of 16 bytes and are whole numbers of vectors. Rows that are not, but follow
// each other without a gap, are taken so many at once that they are; what is left over goes element by element.
template <typename Op, typename F>
void visit_rows(const Extent& extent, const Streams<typename Op::scalar_t>& io, const F& f) {
  constexpr int64_t width = vector_width<typename Op::scalar_t>;
  const int64_t length = extent.channels * extent.space;
  bool aligned = true, dense = true;
  for_each_view(io, [&](const auto& view) {
    aligned = aligned && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    dense = dense && (extent.batch == 1 || view.batch_stride == length);
  });
  const int64_t fold = dense ? width / std::gcd(length, width) : 1;
  for_each_view(
      io, [&](const auto& view) { aligned = aligned && (extent.batch == 1 || fold * view.batch_stride % width == 0); });
  const auto rows_from = [&](int64_t first, int64_t at_once) {
    Streams<typename Op::scalar_t> rows = io;
    const auto start = [&](auto& view) {
      if (view.data != nullptr) view = {view.data + first * view.batch_stride, at_once * view.batch_stride, 1};
    };
    for (auto& view : rows.in) start(view);
    for (auto& view : rows.out) start(view);
    return rows;
  };
  const int64_t by_vectors = aligned && fold * length % width == 0 ? extent.batch / fold : 0;
  const int64_t rest = extent.batch - by_vectors * fold;
  if (by_vectors > 0) {
    const Rows rows{by_vectors, fold * length, extent.channels, extent.space};
    f(rows_kernel<Op, width>, partition_rows(rows, width, Op::unroll, Op::reduces, residency<Op, width>()),
      rows_from(0, fold));
  }
  if (rest > 0) {
    const Rows rows{rest, length, extent.channels, extent.space};
    f(rows_kernel<Op, 1>, partition_rows(rows, 1, Op::unroll, Op::reduces, residency<Op, 1>()),
      rows_from(by_vectors * fold, 1));
  }
}

}  // namespace inplace_abn::cuda
