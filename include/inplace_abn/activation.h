// The only place with activation maths: forward, inverse and derivative, for both backends.
//
// Every activation is a small functor templated on the storage type of x, with
//   scalar_t forward(opmath_t y)                                     z = act(y), rounded to storage
//   void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) y with act(y) = z, and dy = dz * act'(y)
// `inverse` sees nothing but z, so `forward` has to leave in z whatever the inverse needs. Both branches of a piecewise
// activation are told apart by the sign bit, not by `z < 0`: a small negative value may have been rounded to -0.
// y = 0 belongs to the negative branch, as in torch's own derivatives.
#pragma once

#include <ATen/OpMathType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define INPLACE_ABN_INLINE __host__ __device__ __forceinline__
#else
#define INPLACE_ABN_INLINE inline __attribute__((always_inline))
#endif

namespace inplace_abn {

enum class Activation : int64_t { identity = 0, leaky_relu = 1, elu = 2, relu = 3 };
constexpr int64_t activation_count = 4;

INPLACE_ABN_INLINE bool sign_bit(float v) {
  int32_t bits;
  memcpy(&bits, &v, sizeof(bits));
  return bits < 0;
}

INPLACE_ABN_INLINE bool sign_bit(double v) {
  int64_t bits;
  memcpy(&bits, &v, sizeof(bits));
  return bits < 0;
}

template <typename scalar_t>
struct Identity {
  using opmath_t = at::opmath_type<scalar_t>;

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const { return static_cast<scalar_t>(y); }
  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    y = static_cast<opmath_t>(z);
    dy = dz;
  }
};

template <typename scalar_t>
struct LeakyRelu {
  using opmath_t = at::opmath_type<scalar_t>;
  opmath_t slope;
  opmath_t inverse_slope;

  explicit LeakyRelu(double slope_)
      : slope(static_cast<opmath_t>(slope_)), inverse_slope(static_cast<opmath_t>(1 / slope_)) {}

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const {
    return static_cast<scalar_t>(y > 0 ? y : -std::abs(y * slope));
  }
  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const auto value = static_cast<opmath_t>(z);
    const bool negative = sign_bit(value);
    y = negative ? value * inverse_slope : value;
    dy = negative ? dz * slope : dz;
  }
};

// ReLU as the next layer will see it, without the trace that makes it invertible.
template <typename scalar_t>
struct PlainRelu {
  using opmath_t = at::opmath_type<scalar_t>;

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const { return static_cast<scalar_t>(y <= 0 ? opmath_t(0) : y); }
};

// An invertible ReLU is a leaky one whose slope is a power of two, so that the inverse is exact, and so small that the
// negative branch is zero to whoever reads it, yet keeps y a normal number (in fp16 nearly so).
template <typename scalar_t>
constexpr double relu_slope() {
  if constexpr (std::is_same_v<scalar_t, double>) return 0x1p-300;
  if constexpr (std::is_same_v<scalar_t, c10::Half>) return 0x1p-15;
  return 0x1p-48;
}

template <typename scalar_t>
struct Elu {
  using opmath_t = at::opmath_type<scalar_t>;
  opmath_t alpha;
  opmath_t inverse_alpha;

  explicit Elu(double alpha_)
      : alpha(static_cast<opmath_t>(alpha_)), inverse_alpha(static_cast<opmath_t>(1 / alpha_)) {}

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const {
    return static_cast<scalar_t>(y > 0 ? y : -std::abs(alpha * std::expm1(y)));
  }
  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    // A saturated z rounds to -alpha, where log1p is infinite and the derivative zero: stay half an ulp away from it.
    constexpr opmath_t floor = -1 + std::numeric_limits<opmath_t>::epsilon() / 2;
    const auto value = static_cast<opmath_t>(z);
    const bool negative = sign_bit(value);
    const opmath_t ratio = value * inverse_alpha;
    y = negative ? std::log1p(ratio < floor ? floor : ratio) : value;
    const opmath_t slope = value + alpha;
    dy = negative ? dz * (slope < 0 ? opmath_t(0) : slope) : dz;
  }
};

// Calls f with the functor whose `inverse` undoes the invertible forward.
template <typename scalar_t, typename F>
decltype(auto) visit_activation(Activation activation, double param, F&& f) {
  switch (activation) {
    case Activation::identity:
      return f(Identity<scalar_t>{});
    case Activation::leaky_relu:
      return f(LeakyRelu<scalar_t>(param == 0 ? relu_slope<scalar_t>() : param));
    case Activation::relu:
      return f(LeakyRelu<scalar_t>(relu_slope<scalar_t>()));
    case Activation::elu:
      return f(Elu<scalar_t>(param));
  }
  TORCH_CHECK_VALUE(false, "inplace_abn: unknown activation ", static_cast<int64_t>(activation));
}

// Calls f with the functor for a forward pass: invertible, or the plain activation where no backward will follow.
template <typename scalar_t, typename F>
decltype(auto) visit_forward(Activation activation, double param, bool invertible, F&& f) {
  const bool relu = activation == Activation::relu || (activation == Activation::leaky_relu && param == 0);
  if (relu && !invertible) return f(PlainRelu<scalar_t>{});
  return visit_activation<scalar_t>(activation, param, std::forward<F>(f));
}

}  // namespace inplace_abn
