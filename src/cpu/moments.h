// Mean and variance that do not lose digits: deviations are taken from the mean of a sample, and shares are merged with
// Chan's formula in double.
//
// Of n values with mean m, a sample of k has mean s. Then n * (s - m)^2, by which the sum of squares about s exceeds
// the one about m, is at most n / k times the latter: that is the most that the subtraction costs, for whatever values.
#pragma once

#include <ATen/OpMathType.h>

#include <algorithm>

#include "parallel.h"
#include "vectors.h"

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

template <typename scalar_t>
INPLACE_ABN_CLONES Moments panel_moments(const scalar_t* x, int64_t stride, int64_t runs, int64_t length) {
  using opmath_t = at::opmath_type<scalar_t>;
  constexpr int64_t wide = sum_lanes<opmath_t>, narrow = vector_lanes<scalar_t>;
  const int64_t sampled = std::min(length, wide);
  opmath_t sample[wide] = {}, deviation[wide] = {}, square[wide] = {};
  for (int64_t i = 0; i < sampled; ++i) sample[i] = static_cast<opmath_t>(x[i]);
  const auto shift = static_cast<opmath_t>(total(sample) / static_cast<double>(sampled));
  for (int64_t r = 0; r < runs; ++r) {
    const scalar_t *run = x + r * stride, *ahead = ahead_of_run(x, stride, runs, length, r);
    int64_t i = 0;
    for (; i + wide <= length; i += wide) {
      prefetch(ahead + i, wide);
      INPLACE_ABN_INDEPENDENT
      for (int64_t l = 0; l < wide; ++l) {
        const opmath_t d = static_cast<opmath_t>(run[i + l]) - shift;
        deviation[l] += d;
        square[l] += d * d;
      }
    }
    const auto add_vector = [&](const auto* from, int64_t lane) __attribute__((always_inline)) {
      prefetch(ahead + i, narrow);
      INPLACE_ABN_ONE_VECTOR
      for (int64_t l = 0; l < narrow; ++l) {
        const opmath_t d = static_cast<opmath_t>(from[l]) - shift;
        deviation[lane + l] += d;
        square[lane + l] += d * d;
      }
    };
    for (; i + narrow <= length; i += narrow) add_vector(run + i, i % wide);
    if (i < length) add_vector(Padded<scalar_t, opmath_t>(run + i, length - i, shift).data(), i % wide);
  }
  return Moments::from_shifted(static_cast<double>(runs * length), static_cast<double>(shift), total(deviation),
                               total(square));
}

}  // namespace inplace_abn::cpu
