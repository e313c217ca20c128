// The only place with activation maths: forward, inverse and derivative, for both backends.
//
// Every activation is a small functor templated on the storage type of x, with
//   opmath_t value(opmath_t y)                                       z, not yet rounded to storage; act(y) to readers
//   void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) y with act(y) = z, and dy = dz * act'(y)
//   opmath_t slope(opmath_t y)                                       act'(y); only where z does not tell it exactly
// An inverse that reads no tag takes z as opmath_t. `inverse` sees nothing but z, so `value` has to leave in z
// whatever the inverse needs. A zero belongs to the negative branch of a piecewise activation, as in torch's own
// derivatives; a small negative value may have been rounded to -0.
//
// Infinities and NaN come out where torch's do. So y = -inf leaves a trace in z even where act(-inf) is finite: xhat is
// infinite there, and the weight's gradient NaN, although dy is zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "inplace_abn/curves.h"
#include "inplace_abn/math.h"
#include "inplace_abn/types.h"

namespace inplace_abn {

enum class Activation : int64_t {
  identity = 0,
  leaky_relu = 1,
  elu = 2,
  relu = 3,
  silu = 4,
  hardswish = 5,
  gelu = 6,
  gelu_tanh = 7,
  mish = 8
};
constexpr int64_t activation_count = 9;

template <typename scalar_t>
struct Identity {
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const { return y; }
  INPLACE_ABN_INLINE void inverse(opmath_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    y = z;
    dy = dz;
  }
};

template <typename scalar_t>
struct LeakyRelu {
  using opmath_t = opmath_type<scalar_t>;
  opmath_t slope;
  opmath_t inverse_slope;

  explicit LeakyRelu(double slope_)
      : slope(static_cast<opmath_t>(slope_)), inverse_slope(static_cast<opmath_t>(1 / slope_)) {}

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const { return y > 0 ? y : -std::abs(y * slope); }
  INPLACE_ABN_INLINE void inverse(opmath_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const bool negative = sign_bit(z);
    y = negative ? z * inverse_slope : z;
    dy = negative ? dz * slope : dz;
  }
};

// Torch's ReLU, for calls that no backward follows: negative values leave no trace.
template <typename scalar_t>
struct PlainRelu {
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const { return y <= 0 ? opmath_t(0) : y; }
};

// The negative branch is y * slope, too small to be seen by the next layer. dy is selected, not multiplied: on the
// negative branch it is zero even where dz is NaN or infinite. -inf becomes the least positive number that is normal
// (in float16 the least one), and nothing else does. It is not zero, which kernels read where there is no element. A
// smaller y than float16 can hold has no inverse; it becomes -0.
template <typename scalar_t>
struct Relu {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr bool is_half = std::is_same_v<scalar_t, c10::Half>;
  static constexpr opmath_t slope = static_cast<opmath_t>(relu_slope<scalar_t>()), inverse_slope = 1 / slope;
  static constexpr opmath_t of_minus_infinity = is_half ? opmath_t(0x1p-24) : std::numeric_limits<opmath_t>::min();

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const {
    opmath_t trace = -std::abs(y * slope);
    if constexpr (is_half) trace = y < -65504 ? -opmath_t(0) : trace;
    const opmath_t negative = is_minus_infinity(y) ? of_minus_infinity : trace;
    return y <= largest_without_slope() ? negative : y;
  }
  INPLACE_ABN_INLINE void inverse(opmath_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const bool negative = z <= of_minus_infinity;
    const opmath_t traced = z == of_minus_infinity ? -std::numeric_limits<opmath_t>::infinity() : z * inverse_slope;
    y = negative ? traced : z;
    dy = negative ? opmath_t(0) : dz;
  }

 private:
  // The largest y that would round to what -inf becomes.
  INPLACE_ABN_INLINE static constexpr opmath_t largest_without_slope() {
    if constexpr (is_half) return 0x1.7ffffep-24f;
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) return 0x1.01p-126f;
    return of_minus_infinity;
  }
};

// Exponential below zero. -inf becomes the number next to -alpha (in more than 16 bits, where a result of expm1 might
// be off by one, the one after that), if a backward will follow; nothing else does.
template <typename scalar_t>
struct Elu {
  using opmath_t = opmath_type<scalar_t>;
  opmath_t alpha;
  opmath_t inverse_alpha;
  // The y that is returned where z has rounded to -alpha, and no longer determines y. Such y are spread over about one
  // unit below log(half_spacing / alpha); this is the middle.
  opmath_t saturated;
  opmath_t of_minus_infinity;

  explicit Elu(double alpha_, bool invertible = true)
      : alpha(static_cast<opmath_t>(alpha_)),
        inverse_alpha(static_cast<opmath_t>(1 / alpha_)),
        saturated(static_cast<opmath_t>(std::log(half_spacing(alpha_) / alpha_) - 0.5)),
        of_minus_infinity(invertible ? beyond(static_cast<scalar_t>(-alpha)) : -alpha) {}

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const {
    const opmath_t curved = -std::abs(alpha * expm1_nonpositive(y > 0 ? opmath_t(0) : y));
    return y > 0 ? y : (is_minus_infinity(y) ? of_minus_infinity : curved);
  }
  INPLACE_ABN_INLINE void inverse(opmath_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    // Below `floor`, where z is -alpha, log1p would be infinite and the derivative is zero.
    constexpr opmath_t floor = -1 + std::numeric_limits<opmath_t>::epsilon() / 2;
    const bool positive = z > 0;
    const opmath_t ratio = positive ? opmath_t(0) : z * inverse_alpha;
    const opmath_t log = log1p_nonpositive(ratio < floor ? floor : ratio);
    const opmath_t saturating = z == of_minus_infinity ? -std::numeric_limits<opmath_t>::infinity() : saturated;
    y = positive ? z : (ratio < floor ? saturating : log);
    const opmath_t slope = z + alpha;
    dy = positive ? dz : dz * (slope < 0 ? opmath_t(0) : slope);
  }
  INPLACE_ABN_INLINE opmath_t slope(opmath_t y) const { return y > 0 ? opmath_t(1) : alpha * exp_bounded(y); }

 private:
  static opmath_t beyond(scalar_t least) {
    const scalar_t next = next_in_magnitude(least);
    return static_cast<opmath_t>(sizeof(scalar_t) == 2 ? next : next_in_magnitude(next));
  }

  // Half the distance from `v` to the next smaller number that the storage type holds.
  static double half_spacing(double v) {
    constexpr int digits = std::is_same_v<scalar_t, double>          ? 53
                           : std::is_same_v<scalar_t, float>         ? 24
                           : std::is_same_v<scalar_t, c10::BFloat16> ? 8
                                                                     : 11;
    int exponent;
    // Below a power of two the spacing is half of what it is above.
    return std::ldexp(0.5, (std::frexp(v, &exponent) == 0.5 ? exponent - 1 : exponent) - digits);
  }
};

// y * relu6(y + 3) / 6: a parabola between -3 and 3, whose minimum at -1.5 divides it, and flat below -3. Negative
// values say by their low bit on which side of -1.5 they were.
template <typename scalar_t>
struct Hardswish {
  using opmath_t = opmath_type<scalar_t>;
  // Whether y was rounded to storage before it was activated.
  bool of_rounded = false;

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const {
    const opmath_t curved = y * (y < 3 ? (y + 3) / 6 : opmath_t(1));
    const opmath_t exact = y <= -3 ? Flat<scalar_t>::value(y) : curved;
    return with_tag<scalar_t>(exact, Flat<scalar_t>::tag(exact, y, opmath_t(-1.5)));
  }

  INPLACE_ABN_INLINE void inverse(scalar_t stored, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const auto z = static_cast<opmath_t>(stored);
    const bool bit = low_bit(stored), negative = sign_bit(z), left = negative & bit;
    const bool flat = !negative & bit & (z < Flat<scalar_t>::tagged);
    const opmath_t possible = middle<scalar_t>(z, opmath_t(-0.375)), on_range = possible > 3 ? opmath_t(3) : possible;
    const opmath_t root = std::sqrt(9 + 24 * on_range);
    // The two solutions of the parabola add up to -3. The upper one is written so that it keeps its digits near zero.
    const opmath_t upper = 12 * on_range / (3 + root);
    const opmath_t on_parabola = left ? -3 - upper : upper;
    const opmath_t slope = left ? -root / 6 : root / 6;
    // At z = 3 the slope is that of the linear part, as in torch.
    const bool linear = z >= 3;
    opmath_t unbounded = linear ? z : on_parabola, steepness = linear ? opmath_t(1) : slope;
    if constexpr (sizeof(scalar_t) == 2) {
      const bool tagged = z < Flat<scalar_t>::tagged;
      if (of_rounded) {
        round_recovered<scalar_t>(z, tagged, unbounded, steepness, [&](opmath_t at) { return this->slope(at); });
      }
    }
    const opmath_t on_flat = Flat<scalar_t>::y(z);
    y = flat ? on_flat : unbounded;
    dy = flat ? opmath_t(0) : dz * steepness;
  }
  INPLACE_ABN_INLINE opmath_t slope(opmath_t y) const {
    const opmath_t curved = y < 3 ? (2 * y + 3) / 6 : opmath_t(1);
    return y <= -3 ? opmath_t(0) : curved;
  }
};

// Whether z, which is rounded, does not tell the activation's slope exactly.
template <typename Act>
constexpr bool is_curved = requires(const Act& act, typename Act::opmath_t y) { act.slope(y); };

// What `param` is for an activation without a parameter whose y was rounded to storage before it was activated.
constexpr double of_rounded = 1;

// Calls f with the functor whose `inverse` undoes the invertible forward.
template <typename scalar_t, typename F>
decltype(auto) visit_activation(Activation activation, double param, F&& f) {
  switch (activation) {
    case Activation::identity:
      return f(Identity<scalar_t>{});
    case Activation::leaky_relu:
      if (param == 0) return f(Relu<scalar_t>{});
      return f(LeakyRelu<scalar_t>(param));
    case Activation::relu:
      return f(Relu<scalar_t>{});
    case Activation::elu:
      return f(Elu<scalar_t>(param));
    case Activation::silu:
      return f(Silu<scalar_t>{param == of_rounded});
    case Activation::hardswish:
      return f(Hardswish<scalar_t>{param == of_rounded});
    case Activation::gelu:
      return f(Gelu<scalar_t>{param == of_rounded});
    case Activation::gelu_tanh:
      return f(GeluTanh<scalar_t>{param == of_rounded});
    case Activation::mish:
      return f(Mish<scalar_t>{param == of_rounded});
  }
  throw std::invalid_argument("inplace_abn: unknown activation " + std::to_string(static_cast<int64_t>(activation)));
}

// Calls f with the functor for a forward pass: invertible, or the plain activation where no backward will follow.
template <typename scalar_t, typename F>
decltype(auto) visit_forward(Activation activation, double param, bool invertible, F&& f) {
  const bool relu = activation == Activation::relu || (activation == Activation::leaky_relu && param == 0);
  if (relu && !invertible) return f(PlainRelu<scalar_t>{});
  if (activation == Activation::elu) return f(Elu<scalar_t>(param, invertible));
  return visit_activation<scalar_t>(activation, param, std::forward<F>(f));
}

}  // namespace inplace_abn
