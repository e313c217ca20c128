// The only place with activation maths: forward, inverse and derivative, for both backends.
//
// Every activation is a small functor templated on the storage type of x, with
//   scalar_t forward(opmath_t y)                                     z = act(y), rounded to storage
//   void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) y with act(y) = z, and dy = dz * act'(y)
// `inverse` sees nothing but z, so `forward` has to leave in z whatever the inverse needs. Both branches of a piecewise
// activation are told apart by the sign bit, not by `z < 0`: a small negative value may have been rounded to -0.
// y = 0 belongs to the negative branch, as in torch's own derivatives.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "inplace_abn/math.h"
#include "inplace_abn/types.h"

namespace inplace_abn {

enum class Activation : int64_t { identity = 0, leaky_relu = 1, elu = 2, relu = 3, silu = 4, hardswish = 5 };
constexpr int64_t activation_count = 6;

template <typename scalar_t>
struct Identity {
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const { return static_cast<scalar_t>(y); }
  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    y = static_cast<opmath_t>(z);
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
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const { return static_cast<scalar_t>(y <= 0 ? opmath_t(0) : y); }
};

// The slope of an invertible ReLU's negative branch: a power of two, so that the inverse is exact, and so small that
// the branch is zero to whoever reads it, yet keeps y a normal number (in fp16 nearly so).
template <typename scalar_t>
constexpr double relu_slope() {
  if constexpr (std::is_same_v<scalar_t, double>) return 0x1p-300;
  if constexpr (std::is_same_v<scalar_t, c10::Half>) return 0x1p-15;
  return 0x1p-48;
}

// dy is selected, not multiplied: it is zero on the negative branch whatever dz is, NaN and infinity included. A y
// below what the storage type holds has no inverse; it becomes -0, as torch's -inf becomes 0.
template <typename scalar_t>
struct Relu {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr opmath_t slope = static_cast<opmath_t>(relu_slope<scalar_t>()), inverse_slope = 1 / slope;

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const {
    constexpr opmath_t least = -largest();
    const opmath_t trace = y < least ? opmath_t(0) : y * slope;
    return static_cast<scalar_t>(y > 0 ? y : -std::abs(trace));
  }
  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const auto value = static_cast<opmath_t>(z);
    const bool negative = sign_bit(value);
    y = negative ? value * inverse_slope : value;
    dy = negative ? opmath_t(0) : dz;
  }

 private:
  INPLACE_ABN_INLINE static constexpr opmath_t largest() {
    if constexpr (std::is_same_v<scalar_t, c10::Half>) return 65504;
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) return 0x1.fep127f;
    return std::numeric_limits<opmath_t>::max();
  }
};

template <typename scalar_t>
struct Elu {
  using opmath_t = opmath_type<scalar_t>;
  opmath_t alpha;
  opmath_t inverse_alpha;
  // What every y below it is given back as: z has rounded to -alpha there, and says no more. The spread of y beyond is
  // about one, and this is the middle of it.
  opmath_t saturated;

  explicit Elu(double alpha_)
      : alpha(static_cast<opmath_t>(alpha_)),
        inverse_alpha(static_cast<opmath_t>(1 / alpha_)),
        saturated(static_cast<opmath_t>(std::log(half_spacing(alpha_) / alpha_) - 0.5)) {}

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const {
    return static_cast<scalar_t>(y > 0 ? y : -std::abs(alpha * expm1_nonpositive(y > 0 ? opmath_t(0) : y)));
  }
  INPLACE_ABN_INLINE void inverse(scalar_t z, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    // Where z is -alpha, log1p is infinite and the derivative zero.
    constexpr opmath_t floor = -1 + std::numeric_limits<opmath_t>::epsilon() / 2;
    const auto value = static_cast<opmath_t>(z);
    const bool negative = sign_bit(value);
    const opmath_t ratio = negative ? value * inverse_alpha : opmath_t(0);
    const opmath_t log = log1p_nonpositive(ratio < floor ? floor : ratio);
    y = negative ? (ratio < floor ? saturated : log) : value;
    const opmath_t slope = value + alpha;
    dy = negative ? dz * (slope < 0 ? opmath_t(0) : slope) : dz;
  }

 private:
  // Half the distance from `v` to the next smaller number that the storage type holds.
  static double half_spacing(double v) {
    constexpr int digits = std::is_same_v<scalar_t, double>          ? 53
                           : std::is_same_v<scalar_t, float>         ? 24
                           : std::is_same_v<scalar_t, c10::BFloat16> ? 8
                                                                     : 11;
    int exponent;
    // A power of two is the least number of its exponent, and the numbers below it lie twice as densely.
    return std::ldexp(0.5, (std::frexp(v, &exponent) == 0.5 ? exponent - 1 : exponent) - digits);
  }
};

// A bit that says on which side of its minimum a z was, stolen from the lowest bit of the mantissa: cleared where the
// value is `tagged`, set where the mask `bit` is, which is only where it is tagged. Masks, because compilers do not
// vectorise conditions of values of two widths.
INPLACE_ABN_INLINE double with_low_bit(double v, int64_t tagged, int64_t bit) {
  return bits_to<double>((bits_to<int64_t>(v) & ~(tagged & 1)) | (bit & 1));
}
INPLACE_ABN_INLINE float with_low_bit(float v, int32_t tagged, int32_t bit) {
  return bits_to<float>((bits_to<int32_t>(v) & ~(tagged & 1)) | (bit & 1));
}
template <typename scalar_t>
INPLACE_ABN_INLINE scalar_t with_low_bit(scalar_t v, int32_t tagged, int32_t bit) {
  return bits_to<scalar_t>(static_cast<uint16_t>((bits_to<uint16_t>(v) & ~(tagged & 1)) | (bit & 1)));
}
INPLACE_ABN_INLINE bool low_bit(double v) {
  return (bits_to<uint64_t>(v) & 1) != 0;
}
INPLACE_ABN_INLINE bool low_bit(float v) {
  return (bits_to<uint32_t>(v) & 1) != 0;
}
INPLACE_ABN_INLINE bool low_bit(c10::BFloat16 v) {
  return (bits_to<uint32_t>(static_cast<float>(v)) & 0x10000) != 0;
}
INPLACE_ABN_INLINE bool low_bit(c10::Half v) {
  // A float comparison, because the conditions that it is combined with are.
  return static_cast<float>(static_cast<int32_t>(v.x & 1)) > 0.5f;
}

// silu has its minimum at y_min. With t = sqrt(z - z_min) on its right, and t = sqrt(ln(z_min / z)) on its left,
// exp(-y) on the right and y on the left are P(t) / Q(t), which leaves a relative error of `error` in y.
// From z = linear on, y is z to that error. scripts/fit_silu.py makes the coefficients.
constexpr double silu_y_min = -1.278464542761073795109, silu_z_min = -0.278464542761073795109;
constexpr double silu_exp_min = silu_y_min / silu_z_min - 1;

struct CoarseSiluFit {  // error 5e-5
  static constexpr int degree = 4;
  static constexpr double right_p[] = {silu_exp_min, -4.453511214, 2.08297287, -0.4349537345, 0.0341760344};
  static constexpr double right_q[] = {1, 1.793024579, -0.6872587849, -0.03720177518, 0.1367210533};
  static constexpr double left_p[] = {silu_y_min, -1.741414039, -1.101469328, -0.4583176239, -0.2108869702};
  static constexpr double left_q[] = {1, 0.1128731707, 0.2586916006, -0.003748266367, 0.0001202500802};
  static constexpr double linear = 11.9;
};

struct FineSiluFit {  // error 4e-7
  static constexpr int degree = 7;
  static constexpr double right_p[] = {silu_exp_min, 1.421279771,  -6.898257018,   5.393788729,
                                       -2.018399442, 0.4121394733, -0.04446465469, 0.001995855829};
  static constexpr double right_q[] = {
      1, 3.425958432, 1.810002694, -2.036858452, 0.6847381629, 0.2338370767, -0.1685507621, 0.05301717945};
  static constexpr double left_p[] = {silu_y_min,    -1.38495864,   -0.7860682847, -0.5171114352,
                                      -0.2587693651, -0.1000689545, -0.0407343991, -0.01659320357};
  static constexpr double left_q[] = {
      1, -0.1674627701, 0.3756572495, -0.01221117955, 0.03883811447, 0.01662759059, -4.306202744e-07, 2.207227856e-09};
  static constexpr double linear = 16.5;
};

// y * sigmoid(y), whose minimum divides it into two invertible branches. The bit is stolen from negative values only.
template <typename scalar_t>
struct Silu {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr bool is_16_bit = sizeof(scalar_t) == 2, is_double = std::is_same_v<scalar_t, double>;
  using Fit = std::conditional_t<is_16_bit, CoarseSiluFit, FineSiluFit>;
  static constexpr opmath_t y_min = static_cast<opmath_t>(silu_y_min), z_min = static_cast<opmath_t>(silu_z_min);
  static constexpr opmath_t linear = static_cast<opmath_t>(Fit::linear);

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const {
    const auto z = static_cast<scalar_t>(y / (1 + exp_bounded(-y)));
    return with_low_bit(z, sign_mask(y), sign_mask(y - y_min));
  }

  INPLACE_ABN_INLINE void inverse(scalar_t stored, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const auto z = static_cast<opmath_t>(stored);
    const bool left = sign_bit(z) & low_bit(stored);
    // Only what silu gives has a y; the rest is kept finite.
    const opmath_t possible = z < z_min ? z_min : z, bounded = possible > linear ? linear : possible;
    const opmath_t depth = possible * (1 / z_min);
    // At the minimum the logarithm may be wrong by a rounding, and positive.
    const opmath_t log_depth = std::abs(is_16_bit ? log_coarse(depth) : log_positive(depth));
    const opmath_t t2 = left ? log_depth : bounded - z_min, t = std::sqrt(t2);
    const opmath_t p = numerator(left, t, t2), q = denominator(left, t, t2);
    // On the left y is P / Q and sigmoid(y) = z Q / P; on the right y is z (P + Q) / Q and sigmoid(y) = Q / (P + Q).
    // One division serves both quotients.
    const opmath_t s = left ? p : p + q, inverse = 1 / (s * q), by_q = s * inverse, by_s = q * inverse;
    y = s * by_q * (left ? opmath_t(1) : possible);
    const opmath_t sigma = q * by_s * (left ? bounded : opmath_t(1));
    dy = dz * (is_double ? refine(z, y) : sigma + bounded * (1 - sigma));
  }

 private:
  INPLACE_ABN_INLINE static opmath_t choose(bool left, double on_left, double on_right) {
    return left ? static_cast<opmath_t>(on_left) : static_cast<opmath_t>(on_right);
  }

  template <int k>
  INPLACE_ABN_INLINE static opmath_t p(bool left) {
    constexpr double on_left = Fit::left_p[k], on_right = Fit::right_p[k];
    return choose(left, on_left, on_right);
  }
  template <int k>
  INPLACE_ABN_INLINE static opmath_t q(bool left) {
    constexpr double on_left = Fit::left_q[k], on_right = Fit::right_q[k];
    return choose(left, on_left, on_right);
  }
  // Neighbouring terms are added first: all even and all odd ones would cancel each other.
  INPLACE_ABN_INLINE static opmath_t numerator(bool left, opmath_t t, opmath_t t2) {
    opmath_t high = p<4>(left);
    if constexpr (Fit::degree == 7) high += t * p<5>(left) + t2 * (p<6>(left) + t * p<7>(left));
    return p<0>(left) + t * p<1>(left) + t2 * (p<2>(left) + t * p<3>(left)) + t2 * t2 * high;
  }
  INPLACE_ABN_INLINE static opmath_t denominator(bool left, opmath_t t, opmath_t t2) {
    opmath_t high = q<4>(left);
    if constexpr (Fit::degree == 7) high += t * q<5>(left) + t2 * (q<6>(left) + t * q<7>(left));
    return q<0>(left) + t * q<1>(left) + t2 * (q<2>(left) + t * q<3>(left)) + t2 * t2 * high;
  }

  // One step of Halley's method on f(y) = y * sigmoid(y) - z, which leaves the cube of y's error. Returns the
  // derivative of silu. Next to the minimum, where the slope vanishes, the fit is better than a step; so is z itself
  // where it is large.
  INPLACE_ABN_INLINE static opmath_t refine(opmath_t z, opmath_t& y) {
    constexpr opmath_t least_slope = 1e-6;
    if (z > linear) y = z;
    opmath_t e = exp_bounded(-std::abs(y));
    e = e < std::numeric_limits<opmath_t>::min() ? std::numeric_limits<opmath_t>::min() : e;
    // sigmoid(y) = a / d and its complement b / d, and f, f' and f'' without their divisions by d.
    const opmath_t d = 1 + e, a = y < 0 ? e : opmath_t(1), b = y < 0 ? opmath_t(1) : e;
    const opmath_t f = y * a - z * d, slope = d + y * b, bend = 2 * d + y * (b - a);
    const opmath_t change = 2 * f * slope * d / (f * b * bend - 2 * a * slope * slope);
    const opmath_t taken = std::abs(slope) < least_slope * d ? opmath_t(0) : change;
    y += taken;
    // sigmoid at the new y, by its series: the change is small.
    const opmath_t sigma = a / d, complement = b / d;
    const opmath_t moved = taken * (sigma * complement) * (1 + taken * (complement - sigma) / 2);
    return (sigma + moved) * (1 + y * (complement - moved));
  }
};

// y * relu6(y + 3) / 6: a parabola between -3 and 3, whose minimum at -1.5 divides it, and zero below -3. Negative
// values say by their low bit on which side of -1.5 they were; what is zero to the next layer is stored as a positive
// value much smaller than |y|, which its low bit tells from the parabola's own.
template <typename scalar_t>
struct Hardswish {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr opmath_t scale = static_cast<opmath_t>(relu_slope<scalar_t>());
  // Positive values below this carry the bit.
  static constexpr opmath_t tagged = std::is_same_v<scalar_t, c10::Half> ? opmath_t(0.5) : opmath_t(0x1p-8);

  INPLACE_ABN_INLINE scalar_t forward(opmath_t y) const {
    const bool flat = y <= -3;
    const opmath_t magnitude = -y * scale, largest = tagged / 2;
    const opmath_t value = flat ? (magnitude < largest ? magnitude : largest) : y * (y < 3 ? (y + 3) / 6 : opmath_t(1));
    const auto z = static_cast<scalar_t>(value);
    return with_low_bit(z, sign_mask(y) | sign_mask(value - tagged), sign_mask(y - opmath_t(-1.5)));
  }

  INPLACE_ABN_INLINE void inverse(scalar_t stored, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const auto z = static_cast<opmath_t>(stored);
    const bool bit = low_bit(stored), negative = sign_bit(z);
    const bool flat = !negative & bit & (z < tagged);
    const bool left = negative & bit;
    const opmath_t on_range = z < opmath_t(-0.375) ? opmath_t(-0.375) : (z > 3 ? opmath_t(3) : z);
    const opmath_t root = std::sqrt(9 + 24 * on_range);
    // The two solutions add up to -3; the upper one in a form that keeps its digits near zero.
    const opmath_t upper = 12 * on_range / (3 + root);
    const opmath_t on_parabola = left ? -3 - upper : upper;
    const opmath_t slope = left ? -root / 6 : root / 6, dropped = z * (-1 / scale);
    // What rounds to 3 has the slope beyond it, as torch's has.
    const bool linear = z >= 3;
    const opmath_t unbounded = linear ? z : on_parabola, steepness = linear ? opmath_t(1) : slope;
    y = flat ? dropped : unbounded;
    dy = flat ? opmath_t(0) : dz * steepness;
  }
};

// hardswish as torch computes it, from y as it would have been stored.
template <typename scalar_t>
struct PlainHardswish {
  using opmath_t = opmath_type<scalar_t>;

  INPLACE_ABN_INLINE scalar_t forward(opmath_t unrounded) const {
    const auto y = static_cast<opmath_t>(static_cast<scalar_t>(unrounded));
    const opmath_t shifted = y + 3;
    const opmath_t clamped = shifted < 0 ? opmath_t(0) : (shifted > 6 ? opmath_t(6) : shifted);
    return static_cast<scalar_t>(y * clamped / 6);
  }
};

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
      return f(Silu<scalar_t>{});
    case Activation::hardswish:
      return f(Hardswish<scalar_t>{});
  }
  throw std::invalid_argument("inplace_abn: unknown activation " + std::to_string(static_cast<int64_t>(activation)));
}

// Calls f with the functor for a forward pass: invertible, or the plain activation where no backward will follow.
template <typename scalar_t, typename F>
decltype(auto) visit_forward(Activation activation, double param, bool invertible, F&& f) {
  const bool relu = activation == Activation::relu || (activation == Activation::leaky_relu && param == 0);
  if (relu && !invertible) return f(PlainRelu<scalar_t>{});
  if (activation == Activation::hardswish && !invertible) return f(PlainHardswish<scalar_t>{});
  return visit_activation<scalar_t>(activation, param, std::forward<F>(f));
}

}  // namespace inplace_abn
