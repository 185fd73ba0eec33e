// A vector of floats as wide as the instruction set has it, and its loads and stores of each dtype.
//
// Arithmetic is that of the compiler's vector types. Contraction is off, so a product and a sum fuse where fma()
// says so and nowhere else: every instance of a template rounds alike, which row invariance rests on.
#pragma once

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__SSE4_2__)
#include "simd_sse.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace octavo {
namespace OCTAVO_ISA {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

OCTAVO_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

OCTAVO_INLINE Words load_words(const void* p) {
    Words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
OCTAVO_INLINE Words splat_word(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return splat(word);
}
OCTAVO_INLINE Shorts load_shorts(const void* p) {
    Shorts x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
OCTAVO_INLINE void store_shorts(void* p, Shorts x) { std::memcpy(p, &x, sizeof x); }

OCTAVO_INLINE Floats load(const float* p) {
    Floats x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
OCTAVO_INLINE Floats load(const BFloat16* p) { return (Floats)(widen(load_shorts(p)) << 16); }
OCTAVO_INLINE Floats load(const Float16* p) { return from_float16(load_shorts(p)); }

OCTAVO_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
OCTAVO_INLINE void store(BFloat16* p, Floats x) { store_shorts(p, to_bfloat16(x)); }
OCTAVO_INLINE void store(Float16* p, Floats x) { store_shorts(p, to_float16(x)); }
// Of inputs to products, which take subnormal numbers as zero.
OCTAVO_INLINE void store_input(BFloat16* p, Floats x) { store_shorts(p, to_bfloat16_input(x)); }

// Of an address that need not be valid.
template <class T>
OCTAVO_INLINE void prefetch(const T* p, int64_t offset) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + uintptr_t(offset) * sizeof(T)));
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
