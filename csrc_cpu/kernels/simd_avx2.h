// AVX2 with FMA and F16C.
#pragma once

#include "simd_avx.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE Floats splat(float x) { return (Floats)_mm256_set1_ps(x); }
OCTAVO_INLINE Ints splat(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
OCTAVO_INLINE Words splat(uint32_t x) { return (Words)_mm256_set1_epi32(int(x)); }

OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
OCTAVO_INLINE Floats max(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
OCTAVO_INLINE Floats min(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }

OCTAVO_INLINE float sum(Floats x) { return fold<Adding>((__m256)x); }
OCTAVO_INLINE float maximum(Floats x) { return fold<Larger>((__m256)x); }
OCTAVO_INLINE int32_t sum(Ints x) { return generic::sum(x); }
OCTAVO_INLINE int64_t sum(Longs x) { return generic::sum(x); }
OCTAVO_INLINE bool any_nan(Floats a, Floats b) {
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q)) != 0;
}
OCTAVO_INLINE uint32_t lanes_where(Ints x) { return uint32_t(_mm256_movemask_ps((__m256)x)); }

OCTAVO_INLINE Words widen(Shorts x) { return (Words)_mm256_cvtepu16_epi32((__m128i)x); }
OCTAVO_INLINE Shorts narrow(Words x) {
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0xd8);
    return (Shorts)_mm256_castsi256_si128(pairs);
}
OCTAVO_INLINE Floats to_floats(Ints x) { return (Floats)_mm256_cvtepi32_ps((__m256i)x); }
OCTAVO_INLINE LongPair to_longs(Floats x) {
    // Adding 1.5 * 2^52 leaves the nearest integer in the low bits.
    const __m256d magic = _mm256_set1_pd(0x1.8p52);
    const __m256d low = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)), magic);
    const __m256d high = _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)), magic);
    return {(Longs)low - (Longs)magic, (Longs)high - (Longs)magic};
}
OCTAVO_INLINE void store_bytes(int8_t* p, Ints x) { generic::store_bytes(p, x); }
OCTAVO_INLINE int64_t store_from(float lowest, Floats x, int32_t first, float* values, int32_t* numbers) {
    return generic::store_from(lowest, x, first, values, numbers);
}
OCTAVO_INLINE Floats from_float16(Shorts x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }
OCTAVO_INLINE Shorts to_float16(Floats x) {
    return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
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
    const __m256i low = _mm256_set1_epi16(0xff), u = (__m256i)w, s = (__m256i)x;
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return sum + (Ints)even + (Ints)odd;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
