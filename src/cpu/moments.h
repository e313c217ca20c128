// Mean and variance that do not lose digits: deviations are taken from a mean that is already nearly right, and shares
// are merged with Chan's formula in double.
#pragma once

#include <ATen/OpMathType.h>

#include <vector>

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
double total(const opmath_t (&values)[lanes<opmath_t>]) {
  double sum = 0;
  for (const opmath_t value : values) sum += static_cast<double>(value);
  return sum;
}

template <typename scalar_t>
INPLACE_ABN_CLONES Moments panel_moments(const scalar_t* x, int64_t stride, int64_t runs, int64_t length) {
  using opmath_t = at::opmath_type<scalar_t>;
  constexpr int64_t width = lanes<opmath_t>;
  const double count = static_cast<double>(runs * length);
  opmath_t sum[width] = {};
  for (int64_t r = 0; r < runs; ++r) {
    const scalar_t* run = x + r * stride;
    int64_t i = 0;
    for (; i + width <= length; i += width) {
      for (int64_t l = 0; l < width; ++l) sum[l] += static_cast<opmath_t>(run[i + l]);
    }
    for (int64_t l = 0; l < length - i; ++l) sum[l] += static_cast<opmath_t>(run[i + l]);
  }
  const auto shift = static_cast<opmath_t>(total(sum) / count);
  opmath_t deviation[width] = {}, square[width] = {};
  const auto add = [&](int64_t l, scalar_t value) {
    const opmath_t d = static_cast<opmath_t>(value) - shift;
    deviation[l] += d;
    square[l] += d * d;
  };
  for (int64_t r = 0; r < runs; ++r) {
    const scalar_t* run = x + r * stride;
    int64_t i = 0;
    for (; i + width <= length; i += width) {
      for (int64_t l = 0; l < width; ++l) add(l, run[i + l]);
    }
    for (int64_t l = 0; l < length - i; ++l) add(l, run[i + l]);
  }
  return Moments::from_shifted(count, static_cast<double>(shift), total(deviation), total(square));
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void row_sums(const scalar_t* x, int64_t stride, int64_t rows, int64_t channels, opmath_t* sum) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const scalar_t *x0 = x + r * stride, *x1 = x0 + stride, *x2 = x1 + stride, *x3 = x2 + stride;
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      sum[c] += (static_cast<opmath_t>(x0[c]) + static_cast<opmath_t>(x1[c])) +
                (static_cast<opmath_t>(x2[c]) + static_cast<opmath_t>(x3[c]));
    }
  }
  for (; r < rows; ++r) {
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) sum[c] += static_cast<opmath_t>(x[r * stride + c]);
  }
}

template <typename scalar_t, typename opmath_t>
INPLACE_ABN_CLONES void row_deviations(const scalar_t* x, int64_t stride, int64_t rows, int64_t channels,
                                       const opmath_t* shift, opmath_t* deviation, opmath_t* square) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const scalar_t *x0 = x + r * stride, *x1 = x0 + stride, *x2 = x1 + stride, *x3 = x2 + stride;
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      const opmath_t d0 = static_cast<opmath_t>(x0[c]) - shift[c], d1 = static_cast<opmath_t>(x1[c]) - shift[c];
      const opmath_t d2 = static_cast<opmath_t>(x2[c]) - shift[c], d3 = static_cast<opmath_t>(x3[c]) - shift[c];
      deviation[c] += (d0 + d1) + (d2 + d3);
      square[c] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
    }
  }
  for (; r < rows; ++r) {
    INPLACE_ABN_INDEPENDENT
    for (int64_t c = 0; c < channels; ++c) {
      const opmath_t d = static_cast<opmath_t>(x[r * stride + c]) - shift[c];
      deviation[c] += d;
      square[c] += d * d;
    }
  }
}

// The moments of a chunk of rows, for every channel.
template <typename scalar_t>
void row_moments(const View<const scalar_t>& x, int64_t first, int64_t rows, int64_t channels, Moments* moments) {
  using opmath_t = at::opmath_type<scalar_t>;
  std::vector<opmath_t> scratch(3 * channels, opmath_t(0));
  opmath_t *shift = scratch.data(), *deviation = shift + channels, *square = deviation + channels;
  const scalar_t* data = x.data + first * x.batch_stride;
  row_sums(data, x.batch_stride, rows, channels, shift);
  for (int64_t c = 0; c < channels; ++c) shift[c] /= static_cast<opmath_t>(rows);
  row_deviations(data, x.batch_stride, rows, channels, shift, deviation, square);
  for (int64_t c = 0; c < channels; ++c) {
    moments[c] = Moments::from_shifted(static_cast<double>(rows), static_cast<double>(shift[c]),
                                       static_cast<double>(deviation[c]), static_cast<double>(square[c]));
  }
}

}  // namespace inplace_abn::cpu
