// How a run of elements is walked: in vectors, by loops of a constant length. The last, incomplete vector goes through
// stand-ins of a whole one's length, so that no element is handled on its own.
#pragma once

#include <ATen/OpMathType.h>

#include <cstdint>
#include <type_traits>

#include "parallel.h"

namespace inplace_abn::cpu {

// Elements of one vector, at the greatest width there is.
template <typename scalar_t>
constexpr int64_t vector_lanes = 64 / sizeof(scalar_t);
// Enough independent accumulators to keep the floating-point units busy at any vector width.
template <typename opmath_t>
constexpr int64_t sum_lanes = 256 / sizeof(opmath_t);

// A vector's worth of memory.
template <typename scalar_t>
class Padded {
 public:
  INPLACE_ABN_INLINE Padded() {}
  // The `count` elements at `from`, and `fill` behind them.
  INPLACE_ABN_INLINE Padded(const scalar_t* from, int64_t count, scalar_t fill) {
    const auto end = static_cast<index_t>(count);
    const auto* const elements = reinterpret_cast<const element_t*>(from);
    const element_t rest = *reinterpret_cast<const element_t*>(&fill);
    auto* const values = reinterpret_cast<element_t*>(values_);
    INPLACE_ABN_ONE_VECTOR
    for (index_t l = 0; l < width; ++l) values[l] = l < end ? elements[l] : rest;
  }

  INPLACE_ABN_INLINE scalar_t* data() { return values_; }
  INPLACE_ABN_INLINE void store(scalar_t* to, int64_t count) const {
    const auto end = static_cast<index_t>(count);
    auto* const elements = reinterpret_cast<element_t*>(to);
    const auto* const values = reinterpret_cast<const element_t*>(values_);
    INPLACE_ABN_ONE_VECTOR
    for (index_t l = 0; l < width; ++l) {
      if (l < end) elements[l] = values[l];
    }
  }

 private:
  // 16-bit types are classes around their one member, whose conditional copies compilers do not vectorise. The index is
  // as wide as the elements, so that a comparison with it is a mask for them.
  using element_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, scalar_t>;
  using index_t = std::conditional_t<sizeof(scalar_t) == 2, int16_t, int32_t>;
  static constexpr index_t width = vector_lanes<scalar_t>;
  alignas(64) scalar_t values_[width];
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
