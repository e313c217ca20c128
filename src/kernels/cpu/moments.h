// Mean and variance that keep their digits: deviations are taken from the mean of a sample, and shares are merged with
// Chan's formula in double.
//
// Let n values have mean m, and a sample of k of them mean s. The sum of squares about s exceeds that about m by
// n * (s - m)^2, which is at most n / k times the sum about m. So the subtraction of the excess costs at most a factor
// n / k in accuracy, for any values.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "vectors.h"
#include "walk.h"

namespace inplace_abn::cpu {

struct Moments {
  double count = 0, mean = 0, m2 = 0;

  void merge(const Moments& other) {
    if (other.count == 0) return;
    const double total = count + other.count, delta = other.mean - mean;
    mean += delta * (other.count / total);
    m2 += other.m2 + delta * delta * (count * other.count / total);
    count = total;
  }
  double var() const { return count == 0 ? 0 : m2 / count; }

  // From sums over deviations from `shift` and their squares.
  static Moments from_shifted(double count, double shift, double sum, double sum_of_squares) {
    return {count, shift + sum / count, std::max(0.0, sum_of_squares - sum * sum / count)};
  }
};

// The mean of the first elements of a run.
template <typename scalar_t>
INPLACE_ABN_CLONES scalar_t sample_mean(const scalar_t* run, int64_t length) {
  using opmath_t = opmath_type<scalar_t>;
  constexpr int64_t wide = sum_lanes<opmath_t>;
  const int64_t sampled = std::min(length, wide);
  const Loaded<scalar_t, wide> values(run, sampled);
  opmath_t sample[wide] = {};
  for (int64_t i = 0; i < sampled; ++i) sample[i] = values[i];
  return static_cast<scalar_t>(static_cast<opmath_t>(total(sample) / static_cast<double>(sampled)));
}

// Adds a run's deviations from `shift`, and their squares, to lanes. `ahead` is prefetched meanwhile.
template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void add_run(const scalar_t* run, const scalar_t* ahead, int64_t length, scalar_t first_shift,
                                opmath_t* __restrict__ deviation, opmath_t* __restrict__ square) {
  constexpr int64_t wide = sum_lanes<opmath_t>, narrow = vector_lanes<scalar_t>, most = block_size<scalar_t, wide>;
  const auto shift = static_cast<opmath_t>(first_shift);
  int64_t i = 0;
  while (i + wide <= length) {
    const int64_t count = next_block<most, wide>(length - i);
    prefetch(ahead + i, count);
    const Loaded<scalar_t, most> values(run + i, count);
    for (int64_t first = 0; first < count; first += wide) {
      INPLACE_ABN_INDEPENDENT
      for (int64_t l = 0; l < wide; ++l) {
        const opmath_t d = values[first + l] - shift;
        deviation[l] += d;
        square[l] += d * d;
      }
    }
    i += count;
  }
  // All but the first `repeated` elements of a vector.
  const auto add_vector = [&](const scalar_t* from, int64_t lane, int32_t repeated) __attribute__((always_inline)) {
    const Loaded<scalar_t, narrow> values(from);
    INPLACE_ABN_ONE_VECTOR
    for (int32_t l = 0; l < narrow; ++l) {
      const opmath_t d = l < repeated ? opmath_t(0) : values[l] - shift;
      deviation[lane + l] += d;
      square[lane + l] += d * d;
    }
  };
  for (; i + narrow <= length; i += narrow) {
    prefetch(ahead + i, narrow);
    add_vector(run + i, i % wide, 0);
  }
  if (i < length) {
    prefetch(ahead + i, narrow);
    RunEnd<scalar_t> end;
    end.take(run, length, first_shift);
    add_vector(end.data(), i % wide, end.repeated(length));
  }
}

// The moments of each channel of a panel.
template <typename scalar_t>
void panel_moments(const scalar_t* x, int64_t stride, int64_t channel_stride, int64_t channels, int64_t runs,
                   int64_t length, Moments* moments) {
  using opmath_t = opmath_type<scalar_t>;
  constexpr int64_t wide = sum_lanes<opmath_t>;
  alignas(64) opmath_t deviations[max_group][wide], squares[max_group][wide];
  scalar_t shifts[max_group];
  for (int64_t c = 0; c < channels; ++c) {
    shifts[c] = sample_mean(x + c * channel_stride, length);
    std::fill_n(deviations[c], wide, opmath_t(0));
    std::fill_n(squares[c], wide, opmath_t(0));
  }
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t c = 0; c < channels; ++c) {
      const scalar_t* channel = x + c * channel_stride;
      add_run(channel + r * stride, ahead_of_run(channel, stride, runs, channels * channel_stride, r), length,
              shifts[c], deviations[c], squares[c]);
    }
  }
  for (int64_t c = 0; c < channels; ++c) {
    moments[c] = Moments::from_shifted(static_cast<double>(runs * length), static_cast<double>(shifts[c]),
                                       total(deviations[c]), total(squares[c]));
  }
}

// panel_moments as reduce_and_apply_planes calls it.
template <typename scalar_t>
auto panel_moments_of(const View<const scalar_t>& x) {
  return [=](int64_t first, int64_t channels, const Panel& panel, Moments* moments) {
    panel_moments(panel.of(x, first), x.batch_stride, x.channel_stride, channels, panel.runs, panel.length, moments);
  };
}

}  // namespace inplace_abn::cpu
