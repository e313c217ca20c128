// Activations y * gate(y) with a minimum, which divides them into two invertible branches: silu, gelu, mish. Negative z
// say by their lowest bit on which side of it they were.
//
// With t = sqrt(z - z_min) on the right of the minimum, and t = sqrt(ln(z_min / z)) on its left, 1 / gate(y) on the
// right and y on the left are P(t) / Q(t): scripts/fit_inverses.py makes the coefficients. From z = linear on, y is z.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "inplace_abn/fits.h"
#include "inplace_abn/math.h"
#include "inplace_abn/types.h"

namespace inplace_abn {

// The slope of an invertible ReLU's negative branch: a power of two, so that the inverse is exact, and so small that
// the branch is zero to whoever reads it, yet keeps y a normal number (in fp16 nearly so).
template <typename scalar_t>
constexpr double relu_slope() {
  if constexpr (std::is_same_v<scalar_t, double>) return 0x1p-300;
  if constexpr (std::is_same_v<scalar_t, c10::Half>) return 0x1p-15;
  return 0x1p-48;
}

// The lowest bit of the stored mantissa, used to store on which side of the minimum y was. It is set where the mask
// `bit` is, and clear where only the mask `tagged` is; `bit` implies `tagged`. These are masks, because compilers do
// not vectorise conditions on values of two widths.
template <typename opmath_t>
struct Tag {
  using mask_t = std::conditional_t<std::is_same_v<opmath_t, double>, int64_t, int32_t>;
  mask_t tagged, bit;
};

// v, where there is no tag. Elsewhere a value of storage type that has it: in 16 bits the one next to v, so that the
// errors of many values add up to nothing. In wider types they are far below the noise of sums.
template <typename scalar_t, typename opmath_t>
INPLACE_ABN_INLINE opmath_t with_tag(opmath_t v, Tag<opmath_t> tag) {
  using bits_t = std::make_unsigned_t<typename Tag<opmath_t>::mask_t>;
  // The bits of v that storage drops.
  constexpr int dropped = std::is_same_v<scalar_t, c10::BFloat16> ? 16 : std::is_same_v<scalar_t, c10::Half> ? 13 : 0;
  constexpr bits_t unit = bits_t(1) << dropped;
  const auto tagged = static_cast<bits_t>(tag.tagged), bit = static_cast<bits_t>(tag.bit) & unit;
  const auto rounded = [&](bits_t bits) {
    if constexpr (dropped > 0) bits += (tagged & unit) ^ bit;
    return (bits & ~(tagged & (2 * unit - 1))) | bit;
  };
  if constexpr (std::is_same_v<scalar_t, c10::Half>) {
    // Numbers below the normal ones have the spacing of those that come next, to which they are moved for a moment.
    const float magnitude = std::abs(v), base = magnitude < 0x1p-14f ? 0x1p-14f : 0.0f;
    return std::copysign(bits_to<float>(rounded(bits_to<bits_t>(magnitude + base))) - base, v);
  } else {
    return bits_to<opmath_t>(rounded(bits_to<bits_t>(v)));
  }
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
  // Compared as floats, like the conditions that the result is combined with: so the loop is vectorised.
  return static_cast<float>(static_cast<int32_t>(v.x & 1)) > 0.5f;
}

// A z >= z_min from which to compute y and the derivative. In 16 bits the y that are stored as one z next to the
// minimum spread far, and are no longer even around the y of z: the result is the z of their middle. z grows by the
// square of the distance from the minimum there. So the recovered y are right on average, as those of other z are.
template <typename scalar_t, typename opmath_t>
INPLACE_ABN_INLINE opmath_t middle(opmath_t z, opmath_t z_min) {
  if constexpr (sizeof(scalar_t) == 2) {
    constexpr opmath_t eps = std::is_same_v<scalar_t, c10::Half> ? opmath_t(0x1p-10) : opmath_t(0x1p-7);
    // A tag leaves every second value of storage type: they are two units apart.
    const opmath_t unit = eps * (z_min > opmath_t(-0.25) ? opmath_t(0.125) : opmath_t(0.25)), height = z - z_min;
    const opmath_t from = height > unit ? height - unit : opmath_t(0),
                   to = height > -unit ? height + unit : opmath_t(0);
    const opmath_t distance = (std::sqrt(from) + std::sqrt(to)) / 2;
    return height < 64 * unit ? z_min + distance * distance : z;
  } else {
    return z < z_min ? z_min : z;
  }
}

// The flat part of an activation, where its value is zero. It is stored as a positive value much smaller than |y|. Its
// low bit is set; that of other small positive values is cleared. The value of -inf is NaN, as torch's product of -inf
// and zero is.
template <typename scalar_t>
struct Flat {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr opmath_t scale = static_cast<opmath_t>(relu_slope<scalar_t>());
  // Positive values below this carry the bit.
  static constexpr opmath_t tagged = std::is_same_v<scalar_t, c10::Half> ? opmath_t(0.5) : opmath_t(0x1p-8);

  INPLACE_ABN_INLINE static opmath_t value(opmath_t y) {
    const opmath_t magnitude = -y * scale, largest = tagged / 2, nan_if_infinite = y - y;
    return (magnitude < largest ? magnitude : largest) + nan_if_infinite;
  }
  // Negative values have a tag, too: the bit is set on the left of `y_min`.
  INPLACE_ABN_INLINE static Tag<opmath_t> tag(opmath_t value, opmath_t y, opmath_t y_min) {
    return {sign_mask(y) | sign_mask(value - tagged), sign_mask(y - y_min)};
  }
  INPLACE_ABN_INLINE static opmath_t y(opmath_t z) { return z * (-1 / scale); }
};

template <typename opmath_t>
struct Quotient {
  opmath_t numerator, denominator;
};

// The distance of v from the next number of storage type.
template <typename scalar_t>
INPLACE_ABN_INLINE float spacing(float v) {
  const float power = bits_to<float>(bits_to<uint32_t>(v) & 0x7f800000);
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) return power * 0x1p-7f;
  return power < 0x1p-14f ? 0x1p-24f : power * 0x1p-10f;
}

// What a recovered y of 16 bits becomes if it was rounded to storage before it was activated: where one such number
// alone is stored as z, it is that number. Where the slope is nearly one, neighbours among the z and the y are equally
// far from each other, and the y that z says would lie beside the real one in the same direction for all of them.
template <typename scalar_t, typename Slope>
INPLACE_ABN_INLINE void round_recovered(float z, bool tagged, float& y, float& slope, const Slope& slope_at) {
  // A tag leaves every second z. Slopes may be a little below one.
  const float width = spacing<scalar_t>(z) * (tagged ? 2.0f : 1.0f);
  if (0.875f * width <= std::abs(slope) * spacing<scalar_t>(y)) {
    y = static_cast<float>(static_cast<scalar_t>(y));
    slope = slope_at(y);
  }
}

template <bool is_16_bit, typename opmath_t>
INPLACE_ABN_INLINE opmath_t exp_of(opmath_t x) {
  return is_16_bit ? exp_coarse(x) : exp_bounded(x);
}

// A curve has
//   gate<is_16_bit>(y)             as a quotient
//   steepness<is_16_bit>(gate, y)  gate'(y)
//   flat_below<scalar_t>()         below which y is stored as `Flat`, because z would underflow, or nothing

struct SiluCurve : fits::Silu {
  static constexpr bool has_flat = false;

  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static Quotient<opmath_t> gate(opmath_t y) {
    return {1, 1 + exp_of<is_16_bit>(-y)};
  }
  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static opmath_t steepness(opmath_t gate, opmath_t) {
    return gate * (1 - gate);
  }
};

struct GeluCurve : fits::Gelu {
  static constexpr bool has_flat = true;

  template <typename scalar_t>
  static constexpr double flat_below() {
    return std::is_same_v<scalar_t, c10::Half> ? -4.5 : -12;
  }
  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static Quotient<opmath_t> gate(opmath_t y) {
    return {normal_mass_below(y), 1};
  }
  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static opmath_t steepness(opmath_t, opmath_t y) {
    constexpr opmath_t scale = 0.398942280401432677940;  // 1 / sqrt(2 pi)
    return scale * exp_bounded(opmath_t(-0.5) * y * y);
  }
};

// By tanh(u / 2), which is 2 * sigmoid(u) - 1.
struct GeluTanhCurve : fits::GeluTanh {
  static constexpr bool has_flat = true;
  static constexpr double scale = 1.595769121605730711760, cubic = 0.044715;  // sqrt(8 / pi)

  template <typename scalar_t>
  static constexpr double flat_below() {
    return std::is_same_v<scalar_t, c10::Half> ? -4.5 : -9;
  }
  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static Quotient<opmath_t> gate(opmath_t y) {
    return {1, 1 + exp_of<is_16_bit>(-argument(y))};
  }
  // gate * (1 - gate) would cancel, and y and the argument's slope would make the error large: it is computed from the
  // exponential of -|argument| instead. In 16 bits the error does not show, and the product needs fewer registers.
  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static opmath_t steepness(opmath_t gate, opmath_t y) {
    constexpr auto first = static_cast<opmath_t>(scale), third = static_cast<opmath_t>(3 * scale * cubic);
    const opmath_t steepness_of_argument = first + third * y * y;
    if constexpr (is_16_bit) {
      return gate * (1 - gate) * steepness_of_argument;
    } else {
      const opmath_t e = exp_bounded(-std::abs(argument(y))), larger = 1 / (1 + e);
      return e * larger * larger * steepness_of_argument;
    }
  }

 private:
  template <typename opmath_t>
  INPLACE_ABN_INLINE static opmath_t argument(opmath_t y) {
    constexpr auto first = static_cast<opmath_t>(scale), third = static_cast<opmath_t>(scale * cubic);
    return y * (first + third * y * y);
  }
};

// Its gate is tanh(ln(1 + e)) with e = exp(y).
struct MishCurve : fits::Mish {
  static constexpr bool has_flat = false;

  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static Quotient<opmath_t> gate(opmath_t y) {
    // Above 20 the gate rounds to 1; e is bounded, because it would become infinite.
    const opmath_t e = exp_of<is_16_bit>(y > 20 ? opmath_t(20) : y), n = e * (e + 2);
    return {n / (n + 2), 1};
  }
  // (1 - gate^2) * sigmoid(y), without another exponential.
  template <bool is_16_bit, typename opmath_t>
  INPLACE_ABN_INLINE static opmath_t steepness(opmath_t gate, opmath_t) {
    const opmath_t above = 1 + gate, both = std::abs((1 - gate) * above);
    return 2 * gate * both / (above + std::sqrt(both));
  }
};

template <typename scalar_t, typename Curve>
struct WithMinimum {
  using opmath_t = opmath_type<scalar_t>;
  static constexpr bool is_16_bit = sizeof(scalar_t) == 2, is_double = std::is_same_v<scalar_t, double>;
  // The error of the coarse fit keeps its sign over long stretches. It is far below the roundoff of bfloat16, not of
  // float16.
  static constexpr bool is_coarse = std::is_same_v<scalar_t, c10::BFloat16>;
  using Fit = std::conditional_t<is_coarse, typename Curve::Coarse, typename Curve::Fine>;
  static constexpr opmath_t y_min = static_cast<opmath_t>(Curve::y_min), z_min = static_cast<opmath_t>(Curve::z_min);
  static constexpr opmath_t linear = static_cast<opmath_t>(Fit::linear);
  // Whether y was rounded to storage before it was activated.
  bool of_rounded = false;

  INPLACE_ABN_INLINE opmath_t value(opmath_t y) const {
    if constexpr (Curve::has_flat) {
      constexpr opmath_t flat_below = Curve::template flat_below<scalar_t>();
      const auto gate = Curve::template gate<is_16_bit>(y < flat_below ? flat_below : y);
      const opmath_t curved = y * gate.numerator / gate.denominator;
      const opmath_t exact = y < flat_below ? Flat<scalar_t>::value(y) : curved;
      return with_tag<scalar_t>(exact, Flat<scalar_t>::tag(exact, y, y_min));
    } else {
      const auto gate = Curve::template gate<is_16_bit>(y);
      const Tag<opmath_t> tag{sign_mask(y), sign_mask(y - y_min)};
      return with_tag<scalar_t>(y * gate.numerator / gate.denominator, tag);
    }
  }
  // That of the flat part, too, which z does not tell.
  INPLACE_ABN_INLINE opmath_t slope(opmath_t y) const {
    const auto parts = Curve::template gate<false>(y);
    const opmath_t gate = parts.numerator / parts.denominator;
    return gate + y * Curve::template steepness<false>(gate, y);
  }

  INPLACE_ABN_INLINE void inverse(scalar_t stored, opmath_t dz, opmath_t& y, opmath_t& dy) const {
    const auto z = static_cast<opmath_t>(stored);
    const bool bit = low_bit(stored), negative = sign_bit(z), left = negative & bit;
    // Values that the activation never gives have no y; they are moved to one that has, so that all stays finite.
    const opmath_t possible = middle<scalar_t>(z, z_min), bounded = possible > linear ? linear : possible;
    const opmath_t depth = possible * (1 / z_min);
    // At the minimum the logarithm may have the wrong sign by a rounding error.
    const opmath_t log_depth = std::abs(is_coarse ? log_coarse(depth) : log_positive(depth));
    const opmath_t t = std::sqrt(left ? log_depth : bounded - z_min) - choose(left, 0, Fit::centre);
    const opmath_t p = numerator(left, t), q = denominator(left, t);
    // On the left y is P / Q and the gate z Q / P; on the right y is z P / Q and the gate Q / P. One division serves
    // both quotients.
    const opmath_t inverse = 1 / (p * q);
    const opmath_t curved = p * p * inverse * (left ? opmath_t(1) : bounded);
    const opmath_t gate = q * q * inverse * (left ? bounded : opmath_t(1));
    opmath_t slope;
    y = possible <= linear ? curved : possible;
    if constexpr (is_double) {
      slope = refine(z, y);
    } else {
      slope = gate + curved * Curve::template steepness<is_16_bit>(gate, curved);
    }
    if constexpr (is_16_bit) {
      const bool tagged = negative | (Curve::has_flat & (z < Flat<scalar_t>::tagged));
      if (of_rounded) round_recovered<scalar_t>(z, tagged, y, slope, [&](opmath_t at) { return this->slope(at); });
    }
    // The slope is NaN where y is infinite, as torch's product of infinity and zero is.
    dy = dz * (slope + (y - y));
    if constexpr (Curve::has_flat) {
      // Written out here, because GCC does not vectorise the loop if this is a function.
      const bool flat = !negative & bit & (z < Flat<scalar_t>::tagged);
      const opmath_t on_flat = Flat<scalar_t>::y(z);
      y = flat ? on_flat : y;
      dy = flat ? opmath_t(0) : dy;
    }
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
  // By Horner's scheme, which needs the fewest registers.
  template <int k = 0>
  INPLACE_ABN_INLINE static opmath_t numerator(bool left, opmath_t t) {
    if constexpr (k == Fit::degree) {
      return p<k>(left);
    } else {
      return p<k>(left) + t * numerator<k + 1>(left, t);
    }
  }
  template <int k = 0>
  INPLACE_ABN_INLINE static opmath_t denominator(bool left, opmath_t t) {
    if constexpr (k == Fit::degree) {
      return q<k>(left);
    } else {
      return q<k>(left) + t * denominator<k + 1>(left, t);
    }
  }

  // Newton's method on y - z / gate(y), which has y's sign and no underflow. Returns the derivative. Next to the
  // minimum, where the slope vanishes, the fit is better than a step.
  INPLACE_ABN_INLINE static opmath_t refine(opmath_t z, opmath_t& y) {
    constexpr opmath_t least = std::numeric_limits<opmath_t>::min(), least_slope = 1e-6;
    opmath_t slope = 0;
    INPLACE_ABN_ROLLED
    for (int step = 0; step < 4; ++step) {
      const auto parts = Curve::template gate<is_16_bit>(y);
      const opmath_t unbounded = parts.numerator / parts.denominator, gate = unbounded < least ? least : unbounded;
      const opmath_t relative = 1 + y * Curve::template steepness<is_16_bit>(gate, y) / gate;
      slope = gate * relative;
      const bool is_steep = std::abs(relative) > least_slope;
      y -= is_steep & (step < 3) ? (y - z / gate) / relative : opmath_t(0);
    }
    return slope;
  }
};

template <typename scalar_t>
using Silu = WithMinimum<scalar_t, SiluCurve>;
template <typename scalar_t>
using Gelu = WithMinimum<scalar_t, GeluCurve>;
template <typename scalar_t>
using GeluTanh = WithMinimum<scalar_t, GeluTanhCurve>;
template <typename scalar_t>
using Mish = WithMinimum<scalar_t, MishCurve>;

template <typename Act>
constexpr bool has_minimum = false;
template <typename scalar_t, typename Curve>
constexpr bool has_minimum<WithMinimum<scalar_t, Curve>> = true;

}  // namespace inplace_abn
