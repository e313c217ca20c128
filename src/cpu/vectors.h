// How a run of elements is walked: in vectors, by loops of a constant length. The last, incomplete vector goes through
// stand-ins of a whole one's length, so that no element is handled on its own.
#pragma once

#include <ATen/OpMathType.h>

#include "parallel.h"

namespace inplace_abn::cpu {

// Elements of one vector, at the greatest width there is.
template <typename scalar_t>
constexpr int64_t vector_lanes = 64 / sizeof(scalar_t);
// Enough independent accumulators to keep the floating-point units busy at any vector width.
template <typename opmath_t>
constexpr int64_t sum_lanes = 256 / sizeof(opmath_t);

// As many values as a vector of scalar_t has.
template <typename scalar_t, typename value_t = scalar_t>
class Padded {
 public:
  INPLACE_ABN_INLINE Padded() {}
  // The `count` elements at `from`, and `fill` behind them.
  INPLACE_ABN_INLINE Padded(const scalar_t* from, int64_t count, value_t fill) {
    const auto end = static_cast<int32_t>(count);
    INPLACE_ABN_ONE_VECTOR
    for (int32_t l = 0; l < width; ++l) values_[l] = l < end ? static_cast<value_t>(from[l]) : fill;
  }

  INPLACE_ABN_INLINE value_t* data() { return values_; }
  INPLACE_ABN_INLINE void store(value_t* to, int64_t count) const {
    const auto end = static_cast<int32_t>(count);
    INPLACE_ABN_ONE_VECTOR
    for (int32_t l = 0; l < width; ++l) {
      if (l < end) to[l] = values_[l];
    }
  }

 private:
  static constexpr int32_t width = vector_lanes<scalar_t>;
  alignas(64) value_t values_[width];
};

template <typename opmath_t>
INPLACE_ABN_INLINE double total(const opmath_t (&values)[sum_lanes<opmath_t>]) {
  double sums[8] = {};
  for (int64_t i = 0; i < sum_lanes<opmath_t>; i += 8) {
    for (int64_t l = 0; l < 8; ++l) sums[l] += static_cast<double>(values[i + l]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace inplace_abn::cpu
