// How the CUDA kernels walk a tensor, and why so.
//
// Most ops are bound by memory traffic. In units of one activation-sized transfer:
//
//   statistics       1   read x                        forward          2   read x; write z
//   backward_reduce  4   read z, dz; write xhat, dy    backward         3   read xhat, dy; write dx
//   local_forward    3   read x; read x, write z       (2 from device memory where the second read hits the cache)
//   local_backward   5   read z, dz; read z, dz, write dx, inverting z twice;
//               or   7   read z, dz, write xhat, dy; read xhat, dy, write dx, inverting z once (backward.cu says when)
//                        (2 less from device memory where the second reads hit the cache)
//   a residual adds 1 to each pass that inverts or applies the activation, its gradient 1 to the last pass.
//
// There are two kernels, one per memory order, for any op. An op says what to do with an element, given its channel's
// values; the kernel brings elements in and out. Both exist for two widths: 16 bytes, and one element, for tensors that
// do not agree on where 16 bytes start (slices). Rows that are no whole vectors but follow each other are taken several
// at once. At the ragged ends of planes, where a vector is in the plane in part only, its elements are loaded and
// stored one by one; planes without such ends have a kernel of their own.
//
//   grid        x only, one-dimensional: parts of a channel times channels, or parts of the rows times columns of
//               channels, see partition.h. Few channels are cut into many parts, so that all multiprocessors work; many
//               channels are a block each.
//   block       up to 256 threads of at most 80 registers, so that 3 blocks fit on a multiprocessor, 3/8 of the threads
//               that it can hold; fewer registers would spill. 128 registers and 2 blocks for doubles and a few others,
//               64 registers and 4 blocks for reductions that store nothing and need no more.
//   loads       each thread first issues all loads of its `unroll` items: 4 for ops with one input, 2 for ops with two,
//               that is 64 bytes a thread or 48 KB a multiprocessor in flight, where a Hopper's bandwidth times latency
//               is an estimated 25 KB. Plane order: a warp reads 512 consecutive bytes. Row order: rows of 512 bytes,
//               or as long as there are channels, several rows to a warp.
//   reductions  two stages: one share per block in scratch memory, added up by a small kernel; or one stage, where a
//               block has all of its channel. Shares are sums in double, and there are no atomics, so results are the
//               same in every run.
//   second pass walks backward: what the first pass read last is likeliest to be in the second-level cache.
#pragma once

#include <optional>

#include "planes.cuh"
#include "rows.cuh"

namespace inplace_abn::cuda {

// Calls f(kernel, partition, io) for each launch that the tensors take: one, and another one for rows left over. Planes
// with no room for a vector are rows of all channels' planes, where these follow each other.
template <typename Op, typename F>
void visit_launches(const Extent& extent, const Streams<typename Op::scalar_t>& io, const F& f) {
  bool rows = extent.order == Order::rows || extent.space < vector_width<typename Op::scalar_t>;
  for_each_view(
      io, [&](const auto& view) { rows = rows && (extent.channels == 1 || view.channel_stride == extent.space); });
  if (rows) {
    visit_rows<Op>(extent, io, f);
  } else {
    visit_planes<Op>(extent, io, f);
  }
}

// Runs an op that writes elements only.
template <typename Op>
void apply(const Extent& extent, const Op& op, const Streams<typename Op::scalar_t>& io) {
  static_assert(!Op::reduces);
  if (extent.elements() == 0) return;
  visit_launches<Op>(extent, io, [&](const auto& kernel, const auto& partition, const auto& streams) {
    launch(kernel, partition.blocks(), partition.threads, op, streams, partition, nullptr);
  });
}

// Runs an op that reduces each channel and finishes it, with empty totals for an empty tensor.
template <typename Op>
void reduce(const Extent& extent, const Op& op, const Streams<typename Op::scalar_t>& io) {
  static_assert(Op::reduces);
  if (extent.elements() == 0) {
    finish_channels_of(op, nullptr, 0, extent.channels);
    return;
  }
  int64_t shares = 0;
  visit_launches<Op>(extent, io,
                     [&](const auto&, const auto& partition, const auto&) { shares += partition.shares(); });
  std::optional<Scratch<Totals>> memory;
  if (shares > 1) memory.emplace(shares * extent.channels);
  Totals* next = memory ? memory->data() : nullptr;
  visit_launches<Op>(extent, io, [&](const auto& kernel, const auto& partition, const auto& streams) {
    launch(kernel, partition.blocks(), partition.threads, op, streams, partition, next);
    if (memory) next += partition.shares() * extent.channels;
  });
  if (memory) finish_channels_of(op, memory->data(), shares, extent.channels);
}

}  // namespace inplace_abn::cuda
