// Walks over a run of elements: in vectors, by loops of a constant length. What is left at the end is padded to one
// more vector, so that there is no loop over single elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "walk.h"

namespace inplace_abn::cpu {

// Elements of one vector, at the greatest width there is.
template <typename scalar_t>
constexpr int64_t vector_lanes = 64 / sizeof(scalar_t);
// Enough independent accumulators to keep the floating-point units busy at any vector width.
template <typename opmath_t>
constexpr int64_t sum_lanes = 256 / sizeof(opmath_t);

// Copies the first `count` of a vector's elements, and fills in the others.
template <typename element_t>
INPLACE_ABN_INLINE void copy_padded(const element_t* from, int32_t count, element_t fill, element_t* to) {
  INPLACE_ABN_ONE_VECTOR
  for (int32_t l = 0; l < vector_lanes<element_t>; ++l) to[l] = l < count ? from[l] : fill;
}
template <typename element_t>
INPLACE_ABN_INLINE void copy_first(const element_t* from, int32_t count, element_t* to) {
  INPLACE_ABN_ONE_VECTOR
  for (int32_t l = 0; l < vector_lanes<element_t>; ++l) {
    if (l < count) to[l] = from[l];
  }
}

// The same for 16-bit elements, of which not every instruction set has masked loads and stores: out of line, because
// what compilers put in their place is long.
template <typename element_t>
INPLACE_ABN_CLONES void copy_padded_apart(const element_t* from, int64_t count, element_t fill, element_t* to) {
  copy_padded(from, static_cast<int32_t>(count), fill, to);
}
template <typename element_t>
INPLACE_ABN_CLONES void copy_first_apart(const element_t* from, int64_t count, element_t* to) {
  copy_first(from, static_cast<int32_t>(count), to);
}

// A copy of the last vector of a run that does not divide into vectors. Its first elements belong to the vector before,
// too. A run shorter than a vector is copied whole, and padded with `fill`. A pass in place takes the copy before it
// walks the run, and stores it afterwards.
template <typename scalar_t>
class RunEnd {
 public:
  INPLACE_ABN_INLINE void take(const scalar_t* run, int64_t length, scalar_t fill) {
    if (length >= lanes) {
      memcpy(values_, run + first(length), sizeof(values_));
    } else if constexpr (sizeof(scalar_t) == 2) {
      copy_padded_apart<uint16_t>(&run->x, length, fill.x, &values_->x);
    } else {
      copy_padded(run, static_cast<int32_t>(length), fill, values_);
    }
  }

  // The index in the run of its first element.
  INPLACE_ABN_INLINE static int64_t first(int64_t length) { return std::max<int64_t>(0, length - lanes); }
  // How many of its elements belong to the vector before, too.
  INPLACE_ABN_INLINE static int32_t repeated(int64_t length) {
    return length < lanes ? 0 : static_cast<int32_t>(lanes - length % lanes);
  }

  INPLACE_ABN_INLINE scalar_t* data() { return values_; }
  INPLACE_ABN_INLINE void store(scalar_t* run, int64_t length) const {
    if (length >= lanes) {
      memcpy(run + first(length), values_, sizeof(values_));
    } else if constexpr (sizeof(scalar_t) == 2) {
      copy_first_apart<uint16_t>(&values_->x, length, &run->x);
    } else {
      copy_first(values_, static_cast<int32_t>(length), run);
    }
  }

 private:
  static constexpr int64_t lanes = vector_lanes<scalar_t>;
  alignas(64) scalar_t values_[lanes];
};

template <typename opmath_t>
INPLACE_ABN_CLONES double total(const opmath_t (&values)[sum_lanes<opmath_t>]) {
  double sums[8] = {};
  for (int64_t i = 0; i < sum_lanes<opmath_t>; i += 8) {
    for (int64_t l = 0; l < 8; ++l) sums[l] += static_cast<double>(values[i + l]);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace inplace_abn::cpu
