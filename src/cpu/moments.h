// Mean and variance that do not lose digits: deviations are taken from the mean of a sample, and shares are merged with
// Chan's formula in double.
//
// Of n values with mean m, a sample of k has mean s. Then n * (s - m)^2, by which the sum of squares about s exceeds
// the one about m, is at most n / k times the latter: that is the most that the subtraction costs, for whatever values.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>

#include "parallel.h"

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

template <typename opmath_t>
INPLACE_ABN_INLINE double total(const opmath_t (&values)[lanes<opmath_t>]) {
  double sums[8] = {};
  for (int64_t i = 0; i < lanes<opmath_t>; i += 8) {
    for (int64_t l = 0; l < 8; ++l) sums[l] += static_cast<double>(values[i + l]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Calls `step(i, lane)` for i = 0 ... length - 1, in loops of a constant number of independent lanes, and `ahead(i, n)`
// before each of the long ones.
template <typename opmath_t, typename Step, typename Ahead>
INPLACE_ABN_INLINE void for_lanes(int64_t length, const Step& step, const Ahead& ahead) {
  constexpr int64_t wide = lanes<opmath_t>, narrow = narrow_lanes<opmath_t>;
  int64_t i = 0;
  for (; i + wide <= length; i += wide) {
    ahead(i, wide);
    INPLACE_ABN_INDEPENDENT
    for (int64_t l = 0; l < wide; ++l) step(i + l, l);
  }
  for (; i + narrow <= length; i += narrow) {
    INPLACE_ABN_INDEPENDENT
    for (int64_t l = 0; l < narrow; ++l) step(i + l, l);
  }
  for (int64_t l = 0; l < length - i; ++l) step(i + l, l);
}

template <typename scalar_t>
INPLACE_ABN_CLONES Moments panel_moments(const scalar_t* x, int64_t stride, int64_t runs, int64_t length) {
  using opmath_t = at::opmath_type<scalar_t>;
  constexpr int64_t width = lanes<opmath_t>;
  const int64_t sampled = std::min(length, width);
  opmath_t sample[width] = {}, deviation[width] = {}, square[width] = {};
  for (int64_t i = 0; i < sampled; ++i) sample[i] = static_cast<opmath_t>(x[i]);
  const auto shift = static_cast<opmath_t>(total(sample) / static_cast<double>(sampled));
  for (int64_t r = 0; r < runs; ++r) {
    const scalar_t* run = x + r * stride;
    const auto add = [&](int64_t i, int64_t l) __attribute__((always_inline)) {
      const opmath_t d = static_cast<opmath_t>(run[i]) - shift;
      deviation[l] += d;
      square[l] += d * d;
    };
    prefetch_next_run(x, stride, runs, length, r);
    for_lanes<opmath_t>(length, add, [&](int64_t i, int64_t n) {
      if (runs == 1) prefetch_ahead(run + i, n);
    });
  }
  return Moments::from_shifted(static_cast<double>(runs * length), static_cast<double>(shift), total(deviation),
                               total(square));
}

}  // namespace inplace_abn::cpu
