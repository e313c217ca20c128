// exp, log, expm1 and log1p on the ranges that activations need. For float on the host they are branch-free, so that
// loops around them vectorise; everywhere else they are the standard ones. Largest errors over all floats of the stated
// range, in units in the last place: exp_bounded 2, log_positive 2, expm1_nonpositive 3, log1p_nonpositive 3
// (tests/ops/test_math.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "inplace_abn/fits.h"

#if defined(__CUDACC__)
#define INPLACE_ABN_INLINE __host__ __device__ __forceinline__
#else
#define INPLACE_ABN_INLINE inline __attribute__((always_inline))
#endif

// Keeps nvcc from unrolling a loop whose body is long.
#if defined(__CUDACC__)
#define INPLACE_ABN_ROLLED _Pragma("unroll 1")
#else
#define INPLACE_ABN_ROLLED
#endif

namespace inplace_abn {

template <typename To, typename From>
INPLACE_ABN_INLINE To bits_to(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

INPLACE_ABN_INLINE bool sign_bit(float v) {
  return bits_to<int32_t>(v) < 0;
}
INPLACE_ABN_INLINE bool sign_bit(double v) {
  return bits_to<int64_t>(v) < 0;
}

// All ones where the sign bit is set, else zero.
INPLACE_ABN_INLINE int32_t sign_mask(float v) {
  return bits_to<int32_t>(v) >> 31;
}
INPLACE_ABN_INLINE int64_t sign_mask(double v) {
  return bits_to<int64_t>(v) >> 63;
}

template <typename opmath_t>
INPLACE_ABN_INLINE bool is_minus_infinity(opmath_t v) {
  return v < -std::numeric_limits<opmath_t>::max();
}

// The number of v's sign whose magnitude comes next.
template <typename T>
T next_in_magnitude(T v) {
  using bits_t = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  return bits_to<T>(static_cast<bits_t>(bits_to<bits_t>(v) + 1));
}

namespace math_detail {

// x = n * ln 2 + r with |r| <= ln 2 / 2, for -87 <= x <= 88.37. The sum's last mantissa bits are n.
struct Reduced {
  float r;
  float power;  // 2^n
};

INPLACE_ABN_INLINE Reduced reduce(float x) {
  constexpr float shifter = 0x1.8p23f, log2_e = 0x1.715476p0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
  const float shifted = x * log2_e + shifter;
  const float n = shifted - shifter;
  const int32_t exponent = bits_to<int32_t>(shifted) - bits_to<int32_t>(shifter) + 127;
  return {(x - n * ln2_high) - n * ln2_low, bits_to<float>(exponent << 23)};
}

// exp(r) - 1 for |r| <= ln 2 / 2, by its series.
INPLACE_ABN_INLINE float expm1_reduced(float r) {
  const float r2 = r * r;
  const float low = 0.5f + r * (1.0f / 6), middle = 1.0f / 24 + r * (1.0f / 120), high = 1.0f / 720 + r * (1.0f / 5040);
  return r + r2 * (low + r2 * (middle + r2 * high));
}

constexpr float least_exponent = -87.0f, largest_exponent = 88.37f;

// `exponential` of x, which is anything where 2^n is no normal number.
INPLACE_ABN_INLINE float exp_or_limit(float x, float exponential) {
  const float above_zero = x < least_exponent ? 0.0f : exponential;
  return x > largest_exponent ? std::numeric_limits<float>::infinity() : above_zero;
}

INPLACE_ABN_INLINE float exp_float(float x) {
  const Reduced reduced = reduce(x);
  return exp_or_limit(x, reduced.power + reduced.power * expm1_reduced(reduced.r));
}

// 2^n * 2^f with n + f = x / ln 2. The polynomial's relative error is 3e-6; that of the product x / ln 2 adds up to
// 8e-6.
INPLACE_ABN_INLINE float exp_coarse_float(float x) {
  constexpr float shifter = 0x1.8p23f, log2_e = 0x1.715476p0f;
  const float shifted = x * log2_e + shifter, f = x * log2_e - (shifted - shifter);
  const float high = 0.24024744f + f * (0.05591786f + f * 0.009570102f);
  const float power = 0.9999993f + f * (0.6931218f + f * high);
  return exp_or_limit(x, bits_to<float>(bits_to<uint32_t>(power) + (bits_to<uint32_t>(shifted) << 23)));
}

INPLACE_ABN_INLINE float expm1_float(float x) {
  const Reduced reduced = reduce(x < least_exponent ? least_exponent : x);
  return reduced.power * expm1_reduced(reduced.r) + (reduced.power - 1);
}

// ln(m * 2^n) = n ln 2 + ln(1 + f), f = m - 1, with m in [sqrt(1/2), sqrt(2)). The polynomial's relative error is 4e-9.
INPLACE_ABN_INLINE float log_float(float x) {
  constexpr int32_t sqrt_half = 0x3f3504f3;
  const int32_t bits = bits_to<int32_t>(x) - sqrt_half;
  const auto n = static_cast<float>(bits >> 23);
  const float f = bits_to<float>((bits & 0x7fffff) + sqrt_half) - 1, f2 = f * f, f4 = f2 * f2;
  const float p0 = -0.499999883f + f * 0.33333326f, p2 = -0.250015866f + f * 0.200019685f;
  const float p4 = -0.166090127f + f * 0.141818352f, p6 = -0.132434624f + f * 0.129046598f;
  const float tail = f2 * ((p0 + f2 * p2) + f4 * ((p4 + f2 * p6) + f4 * -0.0762111269f));
  constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
  return n * ln2_high + (f + (tail + n * ln2_low));
}

// ln(x), within 5e-5 * |f| for f = m - 1 as above, in few dependent operations.
INPLACE_ABN_INLINE float log_coarse_float(float x) {
  constexpr int32_t sqrt_half = 0x3f3504f3;
  const int32_t bits = bits_to<int32_t>(x) - sqrt_half;
  const auto n = static_cast<float>(bits >> 23);
  const float f = bits_to<float>((bits & 0x7fffff) + sqrt_half) - 1, f2 = f * f;
  const float low = 0.99997282f - f * 0.499387f, high = 0.33593178f - f * 0.27202496f;
  return n * 0x1.62e43p-1f + f * (low + f2 * (high + f2 * 0.18102515f));
}

INPLACE_ABN_INLINE float log1p_float(float x) {
  const float u = 1 + x;
  return log_float(u) + (x - (u - 1)) / u;
}

}  // namespace math_detail

#if defined(__CUDA_ARCH__)
#define INPLACE_ABN_MATH(name, argument, standard) return standard(argument)
#else
#define INPLACE_ABN_MATH(name, argument, standard) \
  if constexpr (std::is_same_v<opmath_t, float>)   \
    return math_detail::name##_float(argument);    \
  else                                             \
    return standard(argument)
#endif

// On the host a float result is zero for x below -87, and infinite above 88.37.
template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t exp_bounded(opmath_t x) {
  INPLACE_ABN_MATH(exp, x, std::exp);
}

// The same for results of 16 bits: on the host the relative error of a float is at most 1e-5.
template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t exp_coarse(opmath_t x) {
  INPLACE_ABN_MATH(exp_coarse, x, std::exp);
}

// x <= 0.
template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t expm1_nonpositive(opmath_t x) {
  INPLACE_ABN_MATH(expm1, x, std::expm1);
}

// x > 0 and normal.
template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t log_positive(opmath_t x) {
  INPLACE_ABN_MATH(log, x, std::log);
}

// x > 0 and normal. For a float the relative error is at most 7e-5, also next to 1, where the result is small.
INPLACE_ABN_INLINE float log_coarse(float x) {
  return math_detail::log_coarse_float(x);
}
INPLACE_ABN_INLINE double log_coarse(double x) {
  return std::log(x);
}

// -1 < x <= 0.
template <typename opmath_t>
INPLACE_ABN_INLINE opmath_t log1p_nonpositive(opmath_t x) {
  INPLACE_ABN_MATH(log1p, x, std::log1p);
}

#undef INPLACE_ABN_MATH

// The standard normal distribution function, for y >= -13. For a float exp(-y * y / 2) * P(|y|) / Q(|y|) is the mass
// beyond |y|; for positive y the result is one minus that. The relative error is at most 5e-6, because that of y * y
// is multiplied by it.
INPLACE_ABN_INLINE float normal_mass_below(float y) {
  constexpr float furthest = 13;
  const float magnitude = std::abs(y), x = magnitude > furthest ? furthest : magnitude, x2 = x * x, x4 = x2 * x2;
  using Tail = fits::NormalTail;
  constexpr float p0 = Tail::p[0], p1 = Tail::p[1], p2 = Tail::p[2], p3 = Tail::p[3], p4 = Tail::p[4], p5 = Tail::p[5];
  constexpr float q0 = Tail::q[0], q1 = Tail::q[1], q2 = Tail::q[2], q3 = Tail::q[3], q4 = Tail::q[4], q5 = Tail::q[5];
  const float numerator = (p0 + x * p1) + x2 * (p2 + x * p3) + x4 * (p4 + x * p5);
  const float denominator = (q0 + x * q1) + x2 * (q2 + x * q3) + x4 * (q4 + x * q5);
  const float tail = exp_bounded(-0.5f * x2) * numerator / denominator;
  return y < 0 ? tail : 1 - tail;
}
INPLACE_ABN_INLINE double normal_mass_below(double y) {
  return 0.5 * std::erfc(-0.707106781186547524401 * y);
}

}  // namespace inplace_abn
