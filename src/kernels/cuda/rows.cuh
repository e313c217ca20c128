// Row order: the kernel, and how its launch is partitioned (partition.h says in which terms).
#pragma once

#include "elements.cuh"
#include "partition.h"

namespace inplace_abn::cuda {

template <typename Op, int width>
__global__ void __launch_bounds__(block_threads, resident<Op, width>)
    rows_kernel(const int64_t first_block, const Op op, const Streams<typename Op::scalar_t> io, const RowPartition p,
                ChannelPartial<Op>* const partials) {
  using scalar_t = typename Op::scalar_t;
  using opmath_t = typename Op::opmath_t;
  constexpr int unroll = Op::unroll, together = Op::at_once ? unroll : 1;
  static_assert(together == 1 || Op::outputs == 0);
  const int x = threadIdx.x % p.width, y = threadIdx.x / p.width;
  const int64_t block = first_block + blockIdx.x, part = quotient(block, p.columns), column = block - part * p.columns;
  const int64_t column_start = column * p.width * width, c = column_start + x * width;

  // Worked out once per channel, not once per thread.
  __shared__ typename Op::Channel shared_channels[most_across(width) * width];
  for (int i = threadIdx.x; i < p.width * width && column_start + i < p.channels; i += blockDim.x) {
    shared_channels[i] = op.channel(column_start + i);
  }
  __syncthreads();
  typename Op::Channel channel[width];
#pragma unroll
  for (int v = 0; v < width; ++v) channel[v] = shared_channels[x * width + v];

  typename Op::template Sum<opmath_t> sum[width] = {};
  opmath_t count = 0;
  // Threads past the last channel only take part in the synchronisation.
  for (int64_t g = part; g < p.groups && c < p.channels; g += p.parts) {
    // A second pass goes backward: what the first pass read last is still in the cache.
    const int64_t row = (Op::reduces ? g : p.groups - 1 - g) * unroll * p.height + y;
    Item<scalar_t, width, Op::inputs> in[unroll];
    Mask exists[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      exists[u] = row + u * p.height < p.rows ? 1 : 0;
      if (exists[u] != 0) load<Op, width>(io, row + u * p.height, c, 0, in[u]);
    }
#pragma unroll
    for (int u = 0; u < unroll; u += together) {
      const Tile<together, 1> tile{exists + u, count == 0};
      if (tile.elements() == 0) continue;
      Item<scalar_t, width, Op::outputs> out[together] = {};
#pragma unroll
      for (int v = 0; v < width; ++v) take<together, 1, width>(op, channel[v], in + u, out, v, sum[v], tile);
      store<Op, width>(io, row + u * p.height, c, 0, out[0]);
      count += static_cast<opmath_t>(tile.elements());
    }
  }

  if constexpr (Op::reduces) {
    using Value = typename Op::template Value<double>;
    Value value[width];
#pragma unroll
    for (int v = 0; v < width; ++v) value[v] = sum[v].result(count);
    __shared__ Value values[width][block_threads];
    __shared__ double counts[block_threads];
#pragma unroll
    for (int v = 0; v < width; ++v) values[v][threadIdx.x] = value[v];
    double merged = counts[threadIdx.x] = count;
    for (int half = p.first_half; half > 0; half /= 2) {
      __syncthreads();
      const int other = threadIdx.x + half * p.width;
      if (y >= half || y + half >= p.height || counts[other] == 0) continue;
      const Shares<double> shares(merged, counts[other]);
      merged += counts[other];
      counts[threadIdx.x] = merged;
#pragma unroll
      for (int v = 0; v < width; ++v) {
        value[v].merge(values[v][other], shares);
        values[v][threadIdx.x] = value[v];
      }
    }
    if (y == 0 && c < p.channels) {
#pragma unroll
      for (int v = 0; v < width; ++v) partials[part * p.channels + c + v] = {merged, value[v]};
    }
  }
}

// Calls f(kernel, partition) with the kernel of the width in which all tensors can be accessed: by vectors, where
// channels divide into them and all rows of all tensors start at multiples of 16 bytes.
template <typename Op, typename F>
void visit_rows(const Extent& extent, const Streams<typename Op::scalar_t>& io, const F& f) {
  constexpr int width = vector_width<typename Op::scalar_t>;
  bool vectors = extent.channels % width == 0;
  for_each_view(io, [&](const auto& view) {
    vectors = vectors && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 &&
              (extent.batch == 1 || view.batch_stride % width == 0);
  });
  if (vectors) {
    f(rows_kernel<Op, width>, partition_rows(extent, width, Op::unroll, current_device()));
  } else {
    f(rows_kernel<Op, 1>, partition_rows(extent, 1, Op::unroll, current_device()));
  }
}

}  // namespace inplace_abn::cuda
