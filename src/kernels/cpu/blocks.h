// Loads and stores of a block of a run or row, with conversion to and from the type of the arithmetic. Compilers do not
// vectorise a loop that converts float16 by hardware, so this is done for the whole block, before or after the loop
// that computes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "inverses.h"
#include "walk.h"

namespace inplace_abn::cpu {

// By hardware where it can convert.
void widen(const c10::Half* from, float* to, int64_t count);
void narrow(const float* from, c10::Half* to, int64_t count);

// The elements of a block of a run: one unit, of a constant length, or several where blocks are converted or inverted
// by a call. `Act` is the activation that is inverted, if any.
template <typename scalar_t, int64_t unit, typename Act = void>
constexpr int64_t block_size =
    std::is_same_v<scalar_t, c10::Half> || std::is_same_v<Act, BlockInverse<scalar_t>> ? std::max<int64_t>(256, unit)
                                                                                       : unit;

// The elements of the next block, of whole units; `left` is at least one unit.
template <int64_t size, int64_t unit>
INPLACE_ABN_INLINE int64_t next_block(int64_t left) {
  if constexpr (size == unit) return unit;
  return std::min(size, left / unit * unit);
}

// Up to `most` elements to read.
template <typename scalar_t, int64_t most>
class Loaded {
 public:
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE explicit Loaded(const scalar_t* from, int64_t = most) : from_(from) {}
  INPLACE_ABN_INLINE opmath_t operator[](int64_t i) const { return static_cast<opmath_t>(from_[i]); }

 private:
  const scalar_t* from_;
};

template <int64_t most>
class Loaded<c10::Half, most> {
 public:
  INPLACE_ABN_INLINE explicit Loaded(const c10::Half* from, int64_t count = most) { widen(from, values_, count); }
  INPLACE_ABN_INLINE float operator[](int64_t i) const { return values_[i]; }

 private:
  alignas(64) float values_[most];
};

// Up to `most` elements to write, each once. `finish` completes the writes.
template <typename scalar_t, int64_t most>
class Stored {
 public:
  INPLACE_ABN_INLINE explicit Stored(scalar_t* to) : to_(to) {}
  INPLACE_ABN_INLINE void set(int64_t i, opmath_type<scalar_t> value) { to_[i] = static_cast<scalar_t>(value); }
  INPLACE_ABN_INLINE void finish(int64_t = most) {}

 private:
  scalar_t* to_;
};

template <int64_t most>
class Stored<c10::Half, most> {
 public:
  INPLACE_ABN_INLINE explicit Stored(c10::Half* to) : to_(to) {}
  INPLACE_ABN_INLINE void set(int64_t i, float value) { values_[i] = value; }
  INPLACE_ABN_INLINE void finish(int64_t count = most) { narrow(values_, to_, count); }

 private:
  c10::Half* to_;
  alignas(64) float values_[most];
};

// Up to `most` z and dz, of which there are y and dy.
template <typename scalar_t, typename Act, int64_t most>
class Inverted {
 public:
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE Inverted(const Act&, const scalar_t* z, const scalar_t* dz, int64_t count = most)
      : z_(z, count), dz_(dz, count) {}
  INPLACE_ABN_INLINE void get(const Act& act, int64_t i, opmath_t& y, opmath_t& dy) const {
    act.inverse(z_[i], dz_[i], y, dy);
  }

 private:
  Loaded<scalar_t, most> z_, dz_;
};

template <typename scalar_t, int64_t most>
class Inverted<scalar_t, BlockInverse<scalar_t>, most> {
 public:
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE Inverted(BlockInverse<scalar_t> inverse, const scalar_t* z, const scalar_t* dz,
                              int64_t count = most)
      : dz_(dz, count) {
    inverse.invert(inverse.act, z, dz, count, y_, dy_);
  }
  INPLACE_ABN_INLINE void get(BlockInverse<scalar_t>, int64_t i, opmath_t& y, opmath_t& dy) const {
    y = y_[i];
    if constexpr (BlockInverse<scalar_t>::gives_slopes) {
      // Where the activation is flat, dy is zero even if dz is NaN or infinite.
      const opmath_t slope = dy_[i], product = dz_[i] * slope;
      dy = slope == 0 ? 0 : product;
    } else {
      dy = dy_[i];
    }
  }

 private:
  Loaded<scalar_t, most> dz_;
  alignas(64) opmath_t y_[most];
  alignas(64) opmath_t dy_[most];
};

}  // namespace inplace_abn::cpu
