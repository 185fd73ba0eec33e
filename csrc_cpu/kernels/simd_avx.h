// Sums and maxima over the lanes of half a vector of AVX-512, or a whole one of AVX2.
#pragma once

#include <immintrin.h>

#include "simd_generic.h"

namespace octavo {
namespace OCTAVO_ISA {

struct Adding {
    static OCTAVO_INLINE __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
    static OCTAVO_INLINE __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
};
struct Larger {
    static OCTAVO_INLINE __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
    static OCTAVO_INLINE __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
};

template <class How>
OCTAVO_INLINE float fold(__m256 x) {
    __m128 y = How::of(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = How::of(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(How::of(y, _mm_movehdup_ps(y)));
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
