// AVX-512 (F, BW, DQ, VL, CD), with BF16 and VNNI where they are.
#pragma once

#include "simd_avx.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE Floats splat(float x) { return (Floats)_mm512_set1_ps(x); }
OCTAVO_INLINE Ints splat(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
OCTAVO_INLINE Words splat(uint32_t x) { return (Words)_mm512_set1_epi32(int(x)); }

OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
OCTAVO_INLINE Floats max(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
OCTAVO_INLINE Floats min(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }

template <class How>
OCTAVO_INLINE float fold(Floats x) {
    return fold<How>(How::of(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1)));
}
OCTAVO_INLINE float sum(Floats x) { return fold<Adding>(x); }
OCTAVO_INLINE float maximum(Floats x) { return fold<Larger>(x); }
OCTAVO_INLINE int32_t sum(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
OCTAVO_INLINE int64_t sum(Longs x) { return _mm512_reduce_add_epi64((__m512i)x); }
OCTAVO_INLINE bool any_nan(Floats a, Floats b) {
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
}
OCTAVO_INLINE uint32_t lanes_where(Ints x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x); }

// By instruction: gcc 12 converts wide vectors by halves.
OCTAVO_INLINE Words widen(Shorts x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
OCTAVO_INLINE Shorts narrow(Words x) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)x); }
OCTAVO_INLINE Floats to_floats(Ints x) { return (Floats)_mm512_cvtepi32_ps((__m512i)x); }
OCTAVO_INLINE LongPair to_longs(Floats x) {
    return {(Longs)_mm512_cvtps_epi64(_mm512_castps512_ps256((__m512)x)),
            (Longs)_mm512_cvtps_epi64(_mm512_extractf32x8_ps((__m512)x, 1))};
}
OCTAVO_INLINE void store_bytes(int8_t* p, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
}
OCTAVO_INLINE int64_t store_from(float lowest, Floats x, int32_t first, float* values, int32_t* numbers) {
    const __mmask16 found = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(lowest), _CMP_GE_OQ);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i each = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(found, (__m512)x));  // by way of a register: that is much faster
    _mm512_storeu_si512(numbers, _mm512_maskz_compress_epi32(found, each));
    return __builtin_popcount(found);
}
OCTAVO_INLINE Floats from_float16(Shorts x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
OCTAVO_INLINE Shorts to_float16(Floats x) {
    return (Shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
OCTAVO_INLINE Shorts to_bfloat16(Floats x) { return generic::to_bfloat16(x); }

constexpr int kInputWords = 1;
OCTAVO_INLINE Words load_inputs(const void* p) { return generic::load_inputs(p); }
template <int>
OCTAVO_INLINE Floats dot_floats(Floats sum, Words x, Words w) { return generic::dot_floats(sum, x, w); }

#if defined(__AVX512BF16__)
OCTAVO_INLINE Shorts to_bfloat16_input(Floats x) { return (Shorts)_mm512_cvtneps_pbh((__m512)x); }
template <int>
OCTAVO_INLINE Floats dot_pairs(Floats sum, Words x, Words w) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
}
#else
OCTAVO_INLINE Shorts to_bfloat16_input(Floats x) { return to_bfloat16(x); }
template <int>
OCTAVO_INLINE Floats dot_pairs(Floats sum, Words x, Words w) { return generic::dot_pairs(sum, x, w); }
#endif

constexpr bool kSignedQuads = false;
template <int>
OCTAVO_INLINE Ints dot_quads(Ints sum, Words x, Words w) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
    const __m512i low = _mm512_set1_epi16(0xff), u = (__m512i)w, s = (__m512i)x;
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u, low), _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
    return sum + (Ints)even + (Ints)odd;
#endif
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
