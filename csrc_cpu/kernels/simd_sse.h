// SSE 4.2 and what comes with it.
#pragma once

#include <immintrin.h>

#include "simd_generic.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE Floats splat(float x) { return generic::splat(x); }
OCTAVO_INLINE Ints splat(int32_t x) { return generic::splat(x); }
OCTAVO_INLINE Words splat(uint32_t x) { return generic::splat(x); }

OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) { return generic::fma(a, b, c); }
OCTAVO_INLINE Floats max(Floats a, Floats b) { return (Floats)_mm_max_ps((__m128)a, (__m128)b); }
OCTAVO_INLINE Floats min(Floats a, Floats b) { return (Floats)_mm_min_ps((__m128)a, (__m128)b); }

OCTAVO_INLINE float sum(Floats x) { return generic::sum(x); }
OCTAVO_INLINE float maximum(Floats x) { return generic::maximum(x); }
OCTAVO_INLINE int32_t sum(Ints x) { return generic::sum(x); }
OCTAVO_INLINE int64_t sum(Longs x) { return generic::sum(x); }
OCTAVO_INLINE bool any_nan(Floats a, Floats b) { return generic::any_nan(a, b); }
OCTAVO_INLINE uint32_t lanes_where(Ints x) { return uint32_t(_mm_movemask_ps((__m128)x)); }

OCTAVO_INLINE Words widen(Shorts x) { return generic::widen(x); }
OCTAVO_INLINE Shorts narrow(Words x) { return generic::narrow(x); }
OCTAVO_INLINE Floats to_floats(Ints x) { return generic::to_floats(x); }
OCTAVO_INLINE LongPair to_longs(Floats x) { return generic::to_longs(x); }
OCTAVO_INLINE void store_bytes(int8_t* p, Ints x) { generic::store_bytes(p, x); }
OCTAVO_INLINE int64_t store_from(float lowest, Floats x, int32_t first, float* values, int32_t* numbers) {
    return generic::store_from(lowest, x, first, values, numbers);
}
OCTAVO_INLINE Floats from_float16(Shorts x) { return generic::from_float16(x); }
OCTAVO_INLINE Shorts to_float16(Floats x) { return generic::to_float16(x); }
OCTAVO_INLINE Shorts to_bfloat16(Floats x) { return generic::to_bfloat16(x); }
OCTAVO_INLINE Shorts to_bfloat16_input(Floats x) { return to_bfloat16(x); }

constexpr int kInputWords = 1;
OCTAVO_INLINE Words load_inputs(const void* p) { return generic::load_inputs(p); }
template <int>
OCTAVO_INLINE Floats dot_floats(Floats sum, Words x, Words w) { return generic::dot_floats(sum, x, w); }
template <int>
OCTAVO_INLINE Floats dot_pairs(Floats sum, Words x, Words w) { return generic::dot_pairs(sum, x, w); }

constexpr bool kSignedQuads = false;
template <int>
OCTAVO_INLINE Ints dot_quads(Ints sum, Words x, Words w) {
    const __m128i low = _mm_set1_epi16(0xff), u = (__m128i)w, s = (__m128i)x;
    const __m128i even = _mm_madd_epi16(_mm_and_si128(u, low), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
    const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(u, 8), _mm_srai_epi16(s, 8));
    return sum + (Ints)even + (Ints)odd;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
