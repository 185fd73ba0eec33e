// The limits of a processor, to give benchmarks' figures as shares of: reading memory, and products in registers.
#pragma once

#include "product.h"
#include "tile_product.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kProbeSums = kRegisters == 32 ? 24 : 10;

// Reads a range once. What it returns only keeps the reads from being dropped.
inline uint32_t probe_read(const void* memory, int64_t bytes) {
    const char* p = static_cast<const char*>(memory);
    Words sums[4] = {};
    for (int64_t at = 0; at + int64_t(4 * sizeof(Words)) <= bytes; at += 4 * sizeof(Words)) {
        for (int i = 0; i < 4; ++i) {
            sums[i] = sums[i] + load_words(p + at + i * sizeof(Words));
            prefetch(p, at + i * int64_t(sizeof(Words)) + kAheadOne);
        }
    }
    return (sums[0] + sums[1] + sums[2] + sums[3])[0];
}

template <class Word>
OCTAVO_INLINE float probe_words(int64_t rounds, uint32_t word) {
    Floats sums[kProbeSums];
    for (int i = 0; i < kProbeSums; ++i) sums[i] = splat(float(i));  // equal ones would become one
    const Words x = splat(word), w = x;
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
        for (int i = 0; i < kProbeSums; ++i) sums[i] = Word::template dot<0>(sums[i], x, w);
    }
    for (int i = 1; i < kProbeSums; ++i) sums[0] += sums[i];
    return sums[0][0];
}

// So many rounds of products of a format. Returns how many operations a round has.
inline int64_t probe_products(int format, int64_t rounds, float* kept) {
    if (format == OCTAVO_FORMAT_FLOAT32) {
        *kept = probe_words<FloatWord>(rounds, 0x3f800000u);
        return kProbeSums * kLanes * 2;
    }
    if (format == OCTAVO_FORMAT_BFLOAT16) {
#if defined(OCTAVO_TILES)
        *kept = 0.0f;
        return probe_tiles(rounds);
#else
        *kept = probe_words<PairWord>(rounds, 0x3f803f80u);
        return kProbeSums * kLanes * 4;
#endif
    }
    Ints sums[kProbeSums];
    for (int i = 0; i < kProbeSums; ++i) sums[i] = splat(int32_t(i));
    const uint32_t word = 0x01010101u;
    const Words x = splat(word), w = x;
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
        for (int i = 0; i < kProbeSums; ++i) sums[i] = dot_quads<0>(sums[i], x, w);
    }
    for (int i = 1; i < kProbeSums; ++i) sums[0] += sums[i];
    *kept = float(sums[0][0]);
    return kProbeSums * kLanes * 8;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
