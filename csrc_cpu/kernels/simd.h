// A vector of floats as wide as the instruction set has it, and its loads and stores of each dtype.
//
// Arithmetic is that of the compiler's vector types. Contraction is off, so a product and a sum fuse where fma()
// says so and nowhere else: every instance of a template rounds alike, which row invariance rests on.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))
#define OCTAVO_LAMBDA __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <class A>
OCTAVO_INLINE A smaller(A a, A b) {
    return a < b ? a : b;
}
template <class A>
OCTAVO_INLINE A larger(A a, A b) {
    return a > b ? a : b;
}
OCTAVO_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

OCTAVO_INLINE Floats splat(float x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (Floats)_mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}
OCTAVO_INLINE Ints splat(int32_t x) { return Ints{} + x; }
OCTAVO_INLINE Words splat(uint32_t x) { return Words{} + x; }

// a * b + c, rounded once where the instruction set can.
OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The larger and the smaller by lane; b where either is NaN.
OCTAVO_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE4_2__)
    return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}
OCTAVO_INLINE Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE4_2__)
    return (Floats)_mm_min_ps((__m128)a, (__m128)b);
#else
    return a < b ? a : b;
#endif
}

// What lanes are folded by.
struct Adding {
    static OCTAVO_INLINE float of(float a, float b) { return a + b; }
#if defined(__AVX2__)
    static OCTAVO_INLINE __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
    static OCTAVO_INLINE __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
#endif
};
struct Larger {
    static OCTAVO_INLINE float of(float a, float b) { return larger(a, b); }
#if defined(__AVX2__)
    static OCTAVO_INLINE __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
    static OCTAVO_INLINE __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
#endif
};

// By halves, so that the order depends on the width alone.
template <class How>
OCTAVO_INLINE float fold(Floats x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256 y = How::of(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
    const __m256 y = (__m256)x;
#endif
    __m128 z = How::of(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = How::of(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(How::of(z, _mm_movehdup_ps(z)));
#else
    float lanes[kLanes];
    std::memcpy(lanes, &x, sizeof x);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] = How::of(lanes[i], lanes[i + half]);
    }
    return lanes[0];
#endif
}
OCTAVO_INLINE float sum(Floats x) { return fold<Adding>(x); }
OCTAVO_INLINE float maximum(Floats x) { return fold<Larger>(x); }
OCTAVO_INLINE int32_t sum(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t lanes[kLanes], total = 0;
    std::memcpy(lanes, &x, sizeof x);
    for (int i = 0; i < kLanes; ++i) total += lanes[i];
    return total;
#endif
}

// A bit for each lane of a comparison's result that is true.
OCTAVO_INLINE uint32_t lanes_where(Ints x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)x));
#elif defined(__SSE4_2__)
    return uint32_t(_mm_movemask_ps((__m128)x));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] & 1) << i;
    return bits;
#endif
}

OCTAVO_INLINE Floats load(const float* p) {
    Floats x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
OCTAVO_INLINE Shorts load_shorts(const void* p) {
    Shorts x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
// By instruction where there is one: gcc 12 converts wide vectors by halves.
OCTAVO_INLINE Words widen(Shorts x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}
OCTAVO_INLINE Shorts narrow(Words x) {
#if defined(__AVX512F__)
    return (Shorts)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0xd8);
    return (Shorts)_mm256_castsi256_si128(pairs);
#else
    return __builtin_convertvector(x, Shorts);
#endif
}

OCTAVO_INLINE Floats load(const BFloat16* p) { return (Floats)(widen(load_shorts(p)) << 16); }
OCTAVO_INLINE Floats load(const Float16* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)load_shorts(p));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps((__m128i)load_shorts(p));
#else
    const Words half = widen(load_shorts(p));
    // The exponent moves by 112, which the product does exactly, subnormals included.
    Words x = (Words)((Floats)((half & 0x7fffu) << 13) * 0x1p112f);
    x = (half & 0x7fffu) >= 0x7c00u ? (x | 0x7f800000u) : x;
    return (Floats)(x | (half & 0x8000u) << 16);
#endif
}

// Of an address that need not be valid.
template <class T>
OCTAVO_INLINE void prefetch(const T* p, int64_t offset) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + uintptr_t(offset) * sizeof(T)));
}

OCTAVO_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
OCTAVO_INLINE void store(BFloat16* p, Floats x) {
    const Words bits = (Words)x;
    Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    rounded = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded;
    const Shorts y = narrow(rounded);
    std::memcpy(p, &y, sizeof y);
}
// Of inputs to products, which take subnormal numbers as zero.
OCTAVO_INLINE void store_input(BFloat16* p, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &y, sizeof y);
#else
    store(p, x);
#endif
}
OCTAVO_INLINE void store(Float16* p, Floats x) {
#if defined(__AVX512F__)
    const __m256i y = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    const __m128i y = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Words sign = (Words)x & 0x80000000u, size = (Words)x & 0x7fffffffu;
    const Words normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    // Below 2^-14 the sum with 0.5 leaves the rounded subnormal in its low bits.
    const Words small = (Words)((Floats)size + 0.5f) - 0x3f000000u;
    Words bits = size < 0x38800000u ? small : normal;
    bits = size >= 0x477ff000u ? splat(0x7c00u) : bits;
    bits = size > 0x7f800000u ? splat(0x7e00u) : bits;
    const Shorts y = narrow(bits | sign >> 16);
#endif
    std::memcpy(p, &y, sizeof y);
}

// The first n lanes, n < kLanes; a load leaves zero in the others.
template <class T>
OCTAVO_INLINE Floats load_first(const T* p, int64_t n) {
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
template <class T>
OCTAVO_INLINE void store_first(T* p, Floats x, int64_t n) {
    T lanes[kLanes];
    store(lanes, x);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

// body(offset, load, store) over `size` elements; the last, shorter vector takes the slow pair.
template <class Body>
OCTAVO_INLINE void for_each_vector(int64_t size, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        body(
            i, [](const auto* p) OCTAVO_LAMBDA { return load(p); },
            [](auto* p, Floats x) OCTAVO_LAMBDA { store(p, x); });
    }
    if (i < size) {
        const int64_t n = size - i;
        body(
            i, [n](const auto* p) OCTAVO_LAMBDA { return load_first(p, n); },
            [n](auto* p, Floats x) OCTAVO_LAMBDA { store_first(p, x, n); });
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
