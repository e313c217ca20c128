// Walks random tensors as the blocks and threads of a CUDA launch do, and fails where an element is not visited exactly
// once.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../src/kernels/cuda/partition.h"

using namespace inplace_abn;
using namespace inplace_abn::cuda;

namespace {

std::mt19937_64 generator(0);

// Small numbers are as likely as large ones.
int64_t random_size(int64_t most) {
  const double exponent = std::uniform_real_distribution<>(0, std::log2(static_cast<double>(most) + 1))(generator);
  return std::clamp<int64_t>(static_cast<int64_t>(std::exp2(exponent)), 1, most);
}

void require(bool condition, const char* what, const Extent& extent) {
  if (condition) return;
  std::printf("%s: %ld x %ld x %ld\n", what, long(extent.batch), long(extent.channels), long(extent.space));
  std::exit(1);
}

template <int width>
void walk_planes(const Extent& extent, int unroll, int64_t resident) {
  const bool even = extent.space % width == 0;
  const int64_t phase = even ? 0 : random_size(width) - 1, plane_stride = extent.channels * extent.space;
  const bool reduces = random_size(2) == 1;
  const PlanePartition p = partition_planes(extent, width, unroll, phase, even, plane_stride, reduces, resident);
  require(p.fits_32_bits(), "planes in 32 bits", extent);
  std::vector<int> visits(extent.elements());
  for (int64_t unit = 0; unit < p.blocks(); ++unit) {
    const int64_t c = unit / p.parts, part = unit % p.parts;
    for (int thread = 0; thread < p.threads; ++thread) {
      int64_t item = part * p.tile + thread;
      Items<int64_t> cursor = p.at(item);
      for (; item < p.items; item += p.parts * p.tile) {
        for (int u = 0; u < unroll; ++u) {
          const int64_t plane = (cursor.planes * extent.channels + c) * extent.space;
          const int64_t first = p.first_element<width>(cursor, plane);
          for (int64_t s = first; s < first + width && item + u * p.threads < p.items; ++s) {
            if (s >= 0 && s < extent.space) ++visits[plane + s];
          }
          cursor.advance(p.next_item, p.slots);
        }
        cursor.advance(p.next_tile, p.slots);
      }
    }
  }
  for (const int count : visits) require(count == 1, "planes", extent);
}

// Rows of `repeats` times all channels, of which each has `space` elements in turn.
void walk_rows(const Rows& rows, int width, int unroll, bool reduces, int64_t resident) {
  const Extent extent{Order::rows, rows.count, rows.length, rows.space};
  const RowPartition p = partition_rows(rows, width, unroll, reduces, resident);
  require(p.threads <= block_threads && p.width <= most_across(width), "block", extent);
  std::vector<int> visits(rows.count * rows.length);
  for (int64_t block = 0; block < p.blocks(); ++block) {
    for (int thread = 0; thread < p.threads; ++thread) {
      const int64_t e = block % p.columns * p.width * width + thread % p.width * width;
      for (int64_t g = block / p.columns; g < p.groups && e < rows.length; g += p.parts) {
        for (int u = 0; u < unroll; ++u) {
          const int64_t row = (g * unroll + u) * p.height + thread / p.width;
          for (int v = 0; v < width && row < rows.count; ++v) ++visits[row * rows.length + e + v];
        }
      }
    }
  }
  for (const int count : visits) require(count == 1, "rows", extent);
  std::vector<int> shares(p.shares() * rows.channels);
  for (int64_t part = 0; part < p.parts; ++part) {
    for (int64_t e = 0; e < rows.length; ++e) {
      require(rows.channel(e) == e / rows.space % rows.channels, "channel", extent);
      ++shares[(part * rows.repeats() + rows.repeat(e)) * rows.channels + rows.channel(e)];
    }
  }
  for (const int count : shares) require(count == 1, "shares", extent);
}

void check_waves(int64_t tiles, int64_t lines, bool reduces, int64_t waves, int64_t resident) {
  const int64_t parts = share_tiles(tiles, lines, reduces, waves, resident);
  const Extent shown{Order::planes, tiles, lines, waves};
  require(parts >= 1 && parts <= tiles, "parts", shown);
  // Only a block for each line, which none can do without, may be more than whole waves.
  require(parts == 1 || parts * lines <= waves * resident, "waves", shown);
  // One more for each line would begin another wave, or be a block of too few tiles; unless there are no more tiles.
  const int64_t full = std::max<int64_t>(1, parts * lines / resident + (parts * lines % resident != 0));
  require(parts == tiles || (parts + 1) * lines > full * resident, "idle multiprocessors", shown);
  // Blocks that take enough tiles would not be done sooner in another number of waves.
  const auto in_turn = [&](int64_t of_parts) { return tiles_in_turn(tiles, lines, of_parts, resident); };
  const int64_t least = reduces ? least_reduced_tiles : least_tiles;
  const int64_t most = std::min(waves, ceil_div(tiles, least) * lines / resident);
  for (int64_t other = 1; other <= most; ++other) {
    const int64_t others = std::clamp<int64_t>(other * resident / lines, 1, tiles);
    require(in_turn(parts) <= in_turn(others), "too many tiles in turn", shown);
  }
}

}  // namespace

int main() {
  const Extent none{};
  require(!PlanePartition{.items = 1ll << 31}.fits_32_bits(), "items beyond 32 bits", none);
  require(!PlanePartition{.plane_stride = 1ll << 31}.fits_32_bits(), "a stride beyond 32 bits", none);
  for (int i = 0; i < 2000; ++i) {
    const int64_t resident = random_size(16) * (1 + random_size(2));
    check_waves(random_size(10000), random_size(3000), random_size(2) == 1, random_size(8), resident);
    const int unroll = 1 << random_size(3) >> 1;
    const Extent planes{Order::planes, random_size(40), random_size(40), random_size(3000)};
    if (planes.elements() > 1 << 18) continue;
    walk_planes<1>(planes, unroll, resident);
    walk_planes<4>(planes, unroll, resident);
    walk_planes<8>(planes, unroll, resident);
    const Extent rows{Order::rows, planes.space, planes.batch * planes.channels, 1};
    for (const int width : {1, 2, 4, 8}) {
      const int64_t space = random_size(7), channels = random_size(40), repeats = random_size(8);
      const Rows folded{random_size(200), repeats * channels * space, channels, space};
      if (folded.length % width == 0) walk_rows(folded, width, unroll, random_size(2) == 1, resident);
      const Rows plain{rows.batch, rows.channels, rows.channels, 1};
      if (plain.length % width == 0) walk_rows(plain, width, unroll, random_size(2) == 1, resident);
    }
  }
}
