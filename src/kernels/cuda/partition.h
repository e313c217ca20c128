// How a tensor is divided among the blocks of a launch: plain arithmetic on extents, strides and the number of blocks
// that the device holds. Results depend on nothing else.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "inplace_abn/activation.h"
#include "inplace_abn/layout.h"

namespace inplace_abn::cuda {

// A block has at most so many threads, and a multiprocessor holds about so many blocks.
constexpr int block_threads = 256;
constexpr int resident_blocks = 3;

// Blocks of a large tensor come in so many waves at most, for balance, and take at least so many tiles each, to be
// worth their start and the share of a reduction that they leave. In row order every block leaves one for each element
// of its column. Where that helps, blocks have fewer tiles: four or more, to be worth the launch that merges shares, or
// two where there is none.
constexpr int64_t plane_waves = 8;
constexpr int64_t row_waves = 2, reduced_row_waves = 1;
constexpr int64_t usual_tiles = 8, least_reduced_tiles = 4, least_tiles = 2;

INPLACE_ABN_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// 64-bit division is slow on the device, and operands are nearly always small.
INPLACE_ABN_INLINE int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// How many tiles one after another it takes, where `parts` blocks share the `tiles` of each line.
inline int64_t tiles_in_turn(int64_t tiles, int64_t lines, int64_t parts, int64_t resident) {
  return ceil_div(parts * lines, resident) * ceil_div(tiles, parts);
}

// The number of blocks that share the `tiles` of one line; all `lines` are alike. All blocks together are whole waves
// of the `resident` ones that the device holds, or a little less: a few more would take as long as another wave. There
// are as many waves as there may be, unless another number has fewer tiles in turn.
inline int64_t share_tiles(int64_t tiles, int64_t lines, bool reduces, int64_t waves, int64_t resident) {
  const auto most_waves = [&](int64_t least) {
    return std::max<int64_t>(1, std::min(ceil_div(tiles, least) * lines, waves * resident) / resident);
  };
  const auto parts = [&](int64_t full) { return std::clamp<int64_t>(full * resident / lines, 1, tiles); };
  const int64_t most = most_waves(reduces ? least_reduced_tiles : least_tiles);
  int64_t best = parts(most_waves(usual_tiles));
  for (int64_t full = 1; full <= most; ++full) {
    const int64_t other = parts(full);
    if (tiles_in_turn(tiles, lines, other, resident) < tiles_in_turn(tiles, lines, best, resident)) best = other;
  }
  return best;
}

// --- Plane order -----------------------------------------------------------------------------------------------------
//
// A plane, the run of one (batch, channel) pair, is cut at the multiples of `width` elements in memory into slots. The
// first and the last slot may be partly outside the plane, so that a plane may start and end anywhere. The slots of all
// planes of a channel, one plane after the other, are its items; `tile` consecutive items are a tile, of which a thread
// takes every `threads`-th; part p of `parts` blocks takes tiles p, p + parts, ...

// A place among the items of a channel, and the way from one to another, which is known beforehand: no thread divides.
template <typename Index>
struct Items {
  Index planes, slots;

  template <typename Other>
  INPLACE_ABN_INLINE Items<Other> as() const {
    return {static_cast<Other>(planes), static_cast<Other>(slots)};
  }
  INPLACE_ABN_INLINE void advance(const Items& by, Index slots_of_plane) {
    planes += by.planes;
    slots += by.slots;
    if (slots >= slots_of_plane) {
      slots -= slots_of_plane;
      ++planes;
    }
  }
};

INPLACE_ABN_INLINE Items<int64_t> split(int64_t items, int64_t slots) {
  const int64_t planes = quotient(items, slots);
  return {planes, items - planes * slots};
}

struct PlanePartition {
  int64_t channels, space;
  int64_t slots, items, tile, parts;
  Items<int64_t> next_item, next_tile;
  int64_t phase;         // elements by which the tensors' first one is past a multiple of the width
  int64_t plane_stride;  // of all tensors, if they agree, from plane to plane of a channel
  int threads;

  int64_t blocks() const { return channels * parts; }
  // The blocks of one channel, each of which leaves a share of a reduction.
  int64_t shares() const { return parts; }
  // Whether planes, slots, items and the next of them, and the stride can be counted in 32 bits.
  bool fits_32_bits() const {
    return std::max(items + (parts + 1) * tile, plane_stride) <= std::numeric_limits<int32_t>::max();
  }
  INPLACE_ABN_INLINE Items<int64_t> at(int64_t item) const { return split(item, slots); }
  // The index in its plane of a slot's first element: negative, or less than `width` before the end, in a ragged slot.
  template <int width>
  INPLACE_ABN_INLINE int64_t first_element(const Items<int64_t>& at, int64_t plane_offset) const {
    return at.slots * width - ((phase + plane_offset) & (width - 1));
  }
};

// `even`: all planes start at multiples of the width. `resident`: blocks that the device holds.
inline PlanePartition partition_planes(const Extent& extent, int width, int unroll, int64_t phase, bool even,
                                       int64_t plane_stride, bool reduces, int64_t resident) {
  PlanePartition p{};
  p.channels = extent.channels;
  p.space = extent.space;
  p.phase = phase;
  p.plane_stride = plane_stride;
  p.slots = ceil_div(extent.space + (even ? 0 : width - 1), width);
  p.items = extent.batch * p.slots;
  // A multiprocessor holds more of smaller blocks, whose threads have all their loads in flight.
  p.threads = static_cast<int>(std::min<int64_t>(block_threads, ceil_div(p.items, 32 * unroll) * 32));
  p.tile = static_cast<int64_t>(p.threads) * unroll;
  const int64_t resident_now = resident * (block_threads / p.threads);
  p.parts = share_tiles(ceil_div(p.items, p.tile), p.channels, reduces, plane_waves, resident_now);
  p.next_item = split(p.threads, p.slots);
  p.next_tile = split((p.parts - 1) * p.tile, p.slots);
  return p;
}

// --- Row order -------------------------------------------------------------------------------------------------------
//
// A block covers a column of elements, `width` vectors across, and, `height` rows at a time, `unroll` times, a group of
// rows. Part p of `parts` blocks takes groups p, p + parts, ... Columns are as equal as can be, so that few threads
// idle.

// The most vectors across: a warp, or where a vector is one element, several, reads consecutive memory.
INPLACE_ABN_INLINE constexpr int most_across(int vector_width) {
  return vector_width == 1 ? 128 : 32;
}

// `count` rows of `length` consecutive elements: one or several times all channels, `space` elements of each in turn.
struct Rows {
  int64_t count, length, channels, space;

  INPLACE_ABN_INLINE int64_t channel(int64_t e) const {
    const int64_t run = quotient(e, space);
    return run - quotient(run, channels) * channels;
  }
  // Elements of a row that belong to the same channel are told apart by a number less than `repeats`.
  INPLACE_ABN_INLINE int64_t repeats() const { return quotient(length, channels); }
  INPLACE_ABN_INLINE int64_t repeat(int64_t e) const {
    const int64_t run = quotient(e, space);
    return quotient(run, channels) * space + e - run * space;
  }
};

struct RowPartition {
  Rows rows;
  int64_t columns, groups, parts;
  int width, height, threads;
  int first_half;  // where the reduction over the block's rows starts: a power of two, at least half of `height`

  int64_t blocks() const { return columns * parts; }
  int64_t shares() const { return parts * rows.repeats(); }
};

inline RowPartition partition_rows(const Rows& rows, int vector_width, int unroll, bool reduces, int64_t resident) {
  RowPartition p{};
  p.rows = rows;
  const int64_t across = ceil_div(rows.length, vector_width);
  p.width = static_cast<int>(ceil_div(across, ceil_div(across, most_across(vector_width))));
  p.columns = ceil_div(across, p.width);
  p.height = static_cast<int>(std::min<int64_t>(block_threads / p.width, rows.count));
  p.threads = p.width * p.height;
  p.first_half = static_cast<int>(std::bit_ceil(static_cast<unsigned>(p.height)) / 2);
  p.groups = ceil_div(rows.count, static_cast<int64_t>(p.height) * unroll);
  p.parts = share_tiles(p.groups, p.columns, reduces, reduces ? reduced_row_waves : row_waves, resident);
  return p;
}

}  // namespace inplace_abn::cuda
