// Conversion of float16 by hardware, which compilers do not use in loops. Results are those of c10::Half's conversions,
// but for the payload of a NaN, of which the hardware keeps some bits.
#include "blocks.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define INPLACE_ABN_F16C __attribute__((target("f16c")))
#endif

namespace inplace_abn::cpu {
namespace {

INPLACE_ABN_CLONES void widen_anywhere(const c10::Half* from, float* to, int64_t count) {
  INPLACE_ABN_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

INPLACE_ABN_CLONES void narrow_anywhere(const float* from, c10::Half* to, int64_t count) {
  INPLACE_ABN_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<c10::Half>(from[i]);
}

#if defined(INPLACE_ABN_F16C)
constexpr int64_t lanes = 8;

INPLACE_ABN_F16C void widen_by_hardware(const c10::Half* from, float* to, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + lanes <= count; i += lanes) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) to[i] = _cvtsh_ss(from[i].x);
}

INPLACE_ABN_F16C void narrow_by_hardware(const float* from, c10::Half* to, int64_t count) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + lanes <= count; i += lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i) to[i].x = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

const bool by_hardware = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx");
#endif

}  // namespace

void widen(const c10::Half* from, float* to, int64_t count) {
#if defined(INPLACE_ABN_F16C)
  if (by_hardware) return widen_by_hardware(from, to, count);
#endif
  widen_anywhere(from, to, count);
}

void narrow(const float* from, c10::Half* to, int64_t count) {
#if defined(INPLACE_ABN_F16C)
  if (by_hardware) return narrow_by_hardware(from, to, count);
#endif
  narrow_anywhere(from, to, count);
}

}  // namespace inplace_abn::cpu
