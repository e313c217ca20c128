// Row order: the channels of a position are one run. Chunks of rows are reduced, all channels together, and their
// shares are merged in double. Then all rows are walked a second time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "moments.h"
#include "walk.h"

namespace inplace_abn::cpu {

// Where channels are few and rows lie side by side, `fold` rows are taken for one of `wide` channels, so that vectors
// are full. Per-channel values are repeated accordingly.
struct RowGrid {
  int64_t rows, channels, fold, wide;

  RowGrid(const Extent& extent, std::initializer_list<int64_t> strides)
      : rows(extent.batch), channels(extent.channels), fold(1), wide(extent.channels) {
    constexpr int64_t vectors = 64, enough = 256;
    const bool dense = std::all_of(strides.begin(), strides.end(), [&](int64_t s) { return s == channels; });
    if (!dense || channels == 0 || channels >= enough) return;
    fold = vectors / std::gcd(vectors, channels);
    while (fold * channels < enough) fold *= 2;
    wide = fold * channels;
  }

  // Calls walk(first_row, folded_rows, rows_per_folded_row, width): the folded rows, then those that are left.
  template <typename Walk>
  void for_each(int64_t first, int64_t count, const Walk& walk) const {
    const int64_t folded = count / fold;
    if (folded > 0) walk(first, folded, fold, wide);
    if (folded * fold < count) walk(first + folded * fold, count - folded * fold, int64_t{1}, channels);
  }

  // The same in blocks of so few rows that their sums can be in the precision of x. Calls finish_block() after each.
  template <typename Walk, typename Finish>
  void for_each_block(int64_t first, int64_t count, const Walk& walk, const Finish& finish_block) const {
    constexpr int64_t block = 128;
    for (int64_t done = 0; done < count; done += block * fold) {
      for_each(first + done, std::min(block * fold, count - done), walk);
      finish_block();
    }
  }
};

// Arrays of one value per channel, repeated for folded rows, initially zero. Each starts at a cache line, so that no
// vector lies on two.
template <typename opmath_t, int arrays>
class ChannelArrays {
 public:
  explicit ChannelArrays(const RowGrid& grid)
      : grid_(grid), stride_((grid.wide + per_line - 1) / per_line * per_line), memory_(arrays * stride_ + per_line) {
    const auto past_line = reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(opmath_t) % per_line;
    first_ = memory_.data() + (per_line - past_line) % per_line;
  }
  ChannelArrays(const ChannelArrays&) = delete;
  ChannelArrays& operator=(const ChannelArrays&) = delete;

  opmath_t* operator[](int array) const { return first_ + array * stride_; }
  void set(int array, int64_t channel, opmath_t value) const {
    for (int64_t f = 0; f < grid_.fold; ++f) (*this)[array][f * grid_.channels + channel] = value;
  }

 private:
  static constexpr int64_t per_line = 64 / sizeof(opmath_t);
  const RowGrid& grid_;
  int64_t stride_;
  std::vector<opmath_t> memory_;
  opmath_t* first_;
};

// Adds the sums of each of `fold` rows to `totals`, and sets them to zero.
template <typename opmath_t>
INPLACE_ABN_CLONES void move_sums(int64_t fold, int64_t channels, opmath_t* sums, double* totals) {
  for (int64_t f = 0; f < fold; ++f) {
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      totals[c] += static_cast<double>(sums[f * channels + c]);
      sums[f * channels + c] = 0;
    }
  }
}

// Merge two fields per channel, of `count` and of `part_count` rows.
struct MergeSums {
  INPLACE_ABN_CLONES static void merge(int64_t n, double, double, double* a, double* b, const double* part_a,
                                       const double* part_b) {
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < n; ++c) {
      a[c] += part_a[c];
      b[c] += part_b[c];
    }
  }
};

struct MergeMoments {
  INPLACE_ABN_CLONES static void merge(int64_t n, double count, double part_count, double* mean, double* m2,
                                       const double* part_mean, const double* part_m2) {
    const double share = part_count / (count + part_count), spread = count * share;
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < n; ++c) {
      const double delta = part_mean[c] - mean[c];
      mean[c] += delta * share;
      m2[c] += part_m2[c] + delta * delta * spread;
    }
  }
};

// `reduce(first_row, rows, a, b)` adds a chunk to its two fields per channel, which are zero; `finish(channel, a, b)`
// gets the merged fields. Threads walk from their last chunk to their first: the last was written most recently, and
// the pass that follows starts with the first.
template <typename Merge, typename Reduce, typename Finish>
void reduce_rows(const Extent& extent, const Reduce& reduce, const Finish& finish) {
  // Enough chunks for any number of threads, if they are large enough to be worth a thread. Not so many that their
  // fields are much beside x, and not so large that the sample for the first mean loses digits.
  constexpr int64_t many_chunks = 64, rows_worth_fields = 256, most_rows = 16 * 1024, least_rows = 16;
  const int64_t channels = extent.channels, rows = extent.batch;
  const int64_t wanted = std::clamp((rows + many_chunks - 1) / many_chunks, rows_worth_fields, most_rows);
  const int64_t chunk = std::max({least_rows, grain_elements / std::max<int64_t>(1, channels),
                                  std::min(wanted, (rows + min_tasks - 1) / min_tasks)});
  const int64_t chunks = std::max<int64_t>(1, (rows + chunk - 1) / chunk);
  const auto fields = std::make_unique_for_overwrite<double[]>(2 * chunks * channels);
  const auto field = [&](int64_t i, int which) { return fields.get() + (2 * i + which) * channels; };
  torch::stable::parallel_for(0, chunks, grain(chunk * channels), [&](int64_t begin, int64_t end) {
    for (int64_t i = end - 1; i >= begin; --i) {
      const int64_t count = std::min(chunk, rows - i * chunk);
      std::fill_n(field(i, 0), 2 * channels, 0.0);
      if (count > 0) reduce(i * chunk, count, field(i, 0), field(i, 1));
    }
  });
  torch::stable::parallel_for(0, channels, grain(chunks), [&](int64_t begin, int64_t end) {
    for (int64_t i = 1; i < chunks; ++i) {
      Merge::merge(end - begin, static_cast<double>(i * chunk), static_cast<double>(std::min(chunk, rows - i * chunk)),
                   field(0, 0) + begin, field(0, 1) + begin, field(i, 0) + begin, field(i, 1) + begin);
    }
    for (int64_t c = begin; c < end; ++c) finish(c, field(0, 0)[c], field(0, 1)[c]);
  });
}

// Element-wise: `apply(first_row, rows, fold, width)`.
template <typename Apply>
void apply_rows(const RowGrid& grid, const Apply& apply) {
  const int64_t folded = (grid.rows + grid.fold - 1) / grid.fold;
  torch::stable::parallel_for(0, folded, grain(grid.wide), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * grid.fold;
    grid.for_each(first, std::min(end * grid.fold, grid.rows) - first, apply);
  });
}

// Rows that are reduced together, so that sums are read and written once for all of them.
constexpr int64_t rows_at_once = 4;

// How far ahead of a row to prefetch: two pages, divided among `tensors`, in whole rows, and at least `rows_at_once`.
template <typename scalar_t>
INPLACE_ABN_INLINE int64_t rows_ahead(int64_t stride, int64_t tensors) {
  const int64_t pages = 2 * page_bytes / sizeof(scalar_t) / tensors;
  return stride == 0 ? 0 : stride * std::max(rows_at_once, (pages + stride - 1) / stride);
}

// Rows to prefetch while those before them are walked.
template <typename scalar_t, int64_t rows>
struct RowsAhead {
  const scalar_t* first;
  int64_t stride;
  static constexpr int64_t bytes_per_channel = rows * sizeof(scalar_t);

  INPLACE_ABN_INLINE void fetch(int64_t begin, int64_t end) const {
    for (int64_t r = 0; r < rows; ++r) prefetch(first + r * stride + begin, end - begin);
  }
};

// Channels that are walked together at most.
constexpr int64_t most_channels = 512;

// Calls walk(first_channel, count) for all channels of rows, portion by portion, and prefetches the same portion of the
// rows ahead. Portions are no larger than what the memory can deliver at a time. The count of whole portions is a
// compile-time constant.
template <typename Walk, typename... Ahead>
INPLACE_ABN_INLINE void for_each_channel(int64_t channels, const Walk& walk, const Ahead&... ahead) {
  constexpr int64_t portion = 1024 / std::max<int64_t>(1024 / most_channels, (Ahead::bytes_per_channel + ... + 0));
  int64_t c = 0;
  for (; c + portion <= channels; c += portion) {
    (ahead.fetch(c, c + portion), ...);
    walk(c, std::integral_constant<int64_t, portion>{});
  }
  if (c == channels) return;
  (ahead.fetch(c, channels), ...);
  walk(c, channels - c);
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void row_sums(const scalar_t* x, int64_t stride, int64_t rows, int64_t channels, opmath_t* sum) {
  for (int64_t r = 0; r < rows; ++r) {
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Loaded<scalar_t, most_channels> row(x + r * stride + c, count);
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) sum[c + i] += row[i];
    };
    for_each_channel(channels, walk);
  }
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void row_deviations(const scalar_t* x, int64_t stride, int64_t rows, int64_t channels,
                                       const opmath_t* shift, opmath_t* deviation, opmath_t* square) {
  const int64_t ahead = rows_ahead<scalar_t>(stride, 1);
  int64_t r = 0;
  for (; r + rows_at_once <= rows; r += rows_at_once) {
    const scalar_t *x0 = x + r * stride, *x1 = x0 + stride, *x2 = x1 + stride, *x3 = x2 + stride;
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Loaded<scalar_t, most_channels> row0(x0 + c, count), row1(x1 + c, count), row2(x2 + c, count),
          row3(x3 + c, count);
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        const opmath_t d0 = row0[i] - shift[c + i], d1 = row1[i] - shift[c + i];
        const opmath_t d2 = row2[i] - shift[c + i], d3 = row3[i] - shift[c + i];
        deviation[c + i] += (d0 + d1) + (d2 + d3);
        square[c + i] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
      }
    };
    for_each_channel(channels, walk, RowsAhead<scalar_t, rows_at_once>{x0 + ahead, stride});
  }
  for (; r < rows; ++r) {
    const auto walk = [&](int64_t c, int64_t count) __attribute__((always_inline)) {
      const Loaded<scalar_t, most_channels> row(x + r * stride + c, count);
      INPLACE_ABN_INDEPENDENT
      for (int64_t i = 0; i < count; ++i) {
        const opmath_t d = row[i] - shift[c + i];
        deviation[c + i] += d;
        square[c + i] += d * d;
      }
    };
    for_each_channel(channels, walk);
  }
}

// Turns sums of deviations from `shift` and of their squares into the mean and the sum of squared deviations from it.
template <typename opmath_t>
INPLACE_ABN_CLONES void shifted_moments(int64_t channels, double count, const opmath_t* shift, double* mean,
                                        double* m2) {
  const double inverse = 1 / count;
  INPLACE_ABN_INDEPENDENT
  for (int64_t c = 0; c < channels; ++c) {
    const double sum = mean[c], centred = m2[c] - sum * sum * inverse;
    mean[c] = static_cast<double>(shift[c]) + sum * inverse;
    m2[c] = centred < 0 ? 0 : centred;
  }
}

// The mean and the sum of squared deviations of a chunk of rows, for every channel.
template <typename scalar_t>
void row_moments(const RowGrid& grid, const View<const scalar_t>& x, int64_t first, int64_t rows, double* mean,
                 double* m2) {
  using opmath_t = opmath_type<scalar_t>;
  constexpr int64_t least_sample = 4, share = 64;
  const ChannelArrays<opmath_t, 3> arrays(grid);
  const auto at_row = [&](int64_t row) { return x.data + row * x.batch_stride; };
  const int64_t sampled = std::min(rows, std::max(least_sample, (rows + share - 1) / share));
  row_sums(at_row(first), x.batch_stride, sampled, grid.channels, arrays[0]);
  for (int64_t c = 0; c < grid.channels; ++c) arrays.set(0, c, arrays[0][c] / static_cast<opmath_t>(sampled));
  grid.for_each_block(
      first, rows,
      [&](int64_t row, int64_t count, int64_t fold, int64_t width) {
        row_deviations(at_row(row), x.batch_stride * fold, count, width, arrays[0], arrays[1], arrays[2]);
      },
      [&] {
        move_sums(grid.fold, grid.channels, arrays[1], mean);
        move_sums(grid.fold, grid.channels, arrays[2], m2);
      });
  shifted_moments(grid.channels, static_cast<double>(rows), arrays[0], mean, m2);
}

}  // namespace inplace_abn::cpu
