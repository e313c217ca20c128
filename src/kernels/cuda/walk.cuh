// How the CUDA kernels walk a tensor, and why so.
//
// Most ops are bound by memory traffic. In units of one activation-sized transfer:
//
//   statistics       1   read x                        forward          2   read x; write z
//   backward_reduce  4   read z, dz; write xhat, dy    backward         3   read xhat, dy; write dx
//   local_forward    3   read x; read x, write z       (2 from device memory where the second read hits the cache)
//   local_backward   5   read z, dz; read z, dz, write dx: inverting z once more is cheaper than 2 more writes
//                        (3 from device memory where the second reads hit the cache)
//   a residual adds 1 to each pass that inverts or applies the activation, its gradient 1 to the last pass.
//
// There are two kernels, one per memory order, for any op. An op says what to do with an element, given its channel's
// values; the kernel brings elements in and out. Both exist for two widths: 16 bytes, and one element, for tensors that
// do not agree on where 16 bytes start (slices) or whose channels are no multiple of 16 bytes (row order). At the
// ragged ends of planes, where a vector is in the plane in part only, its elements are loaded and stored one by one.
//
//   grid        x only, one-dimensional: parts of a channel times channels, or parts of the rows times columns of
//               channels, see partition.h. Few channels are cut into many parts, so that all multiprocessors work; many
//               channels are a block each.
//   block       up to 256 threads of at most 80 registers, so that 3 blocks fit on a multiprocessor, 3/8 of the threads
//               that it can hold; fewer registers would spill. 128 registers and 2 blocks for doubles and a few others.
//   loads       each thread first issues all loads of its `unroll` items: 4 for ops with one input, 2 for ops with two,
//               that is 64 bytes a thread or 48 KB a multiprocessor in flight, where a Hopper's bandwidth times latency
//               is an estimated 25 KB. Plane order: a warp reads 512 consecutive bytes. Row order: rows of 512 bytes,
//               or as long as there are channels, several rows to a warp.
//   reductions  two stages: one partial result per block in scratch memory, merged by a small kernel. Both merge in
//               double, and neither uses atomics, so results are the same in every run.
//   second pass walks backward: what the first pass read last is likeliest to be in the second-level cache. The local
//               ops can go through the channels group by group, each group small enough to stay there between its two
//               passes (launch.cuh says when); in row order a group's share of a row is a multiple of 256 bytes.
#pragma once

#include "planes.cuh"
#include "rows.cuh"

namespace inplace_abn::cuda {

// Runs an op that writes elements only.
template <typename Op>
void apply(const Extent& extent, const Op& op, const Streams<typename Op::scalar_t>& io) {
  static_assert(!Op::reduces);
  if (extent.elements() == 0) return;
  const auto run = [&](const auto& kernel, const auto& partition) {
    launch(kernel, partition.blocks(), partition.threads, op, io, partition, nullptr);
  };
  if (extent.order == Order::planes) {
    visit_planes<Op>(extent, io, run);
  } else {
    visit_rows<Op>(extent, io, run);
  }
}

// Runs an op that reduces each channel, and calls `finish(channel, partial)` on the device with the merged results,
// empty ones for an empty tensor.
template <typename Op, typename Finish>
void reduce(const Extent& extent, const Op& op, const Streams<typename Op::scalar_t>& io, const Finish& finish) {
  static_assert(Op::reduces);
  const auto run = [&](const auto& kernel, const auto& partition) {
    const Scratch<ChannelPartial<Op>> partials(partition.parts * extent.channels);
    launch(kernel, partition.blocks(), partition.threads, op, io, partition, partials.data());
    finish_channels_of(partials.data(), partition.parts, extent.channels, finish);
  };
  if (extent.elements() == 0) {
    finish_channels_of<Op::template Value>(nullptr, 0, extent.channels, finish);
  } else if (extent.order == Order::planes) {
    visit_planes<Op>(extent, io, run);
  } else {
    visit_rows<Op>(extent, io, run);
  }
}

// --- Channel groups --------------------------------------------------------------------------------------------------

// Calls f(extent, first channel) for each group of channels that is to be reduced and applied before the next. The
// first pass reads `streams` tensors of scalar_t.
template <typename scalar_t, typename F>
void for_each_channel_group(const Extent& extent, int64_t streams, const F& f) {
  if (extent.channels == 0) return;
  const int64_t step = channels_per_group(extent, sizeof(scalar_t), streams, current_device());
  for (int64_t first = 0; first < extent.channels; first += step) {
    f(Extent{extent.order, extent.batch, std::min(step, extent.channels - first), extent.space}, first);
  }
}

}  // namespace inplace_abn::cuda
