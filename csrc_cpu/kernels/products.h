// The two products of attention on register blocks: queries times keys, weights times values.
//
// Each sum runs over its own dims or positions in ascending order, whatever block it is computed in.
#pragma once

#include "simd.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

// Rows and vectors of one register block.
#if defined(__AVX512F__)
constexpr int kRows = 6, kVectors = 4;
#else
constexpr int kRows = 6, kVectors = 2;
#endif
constexpr int kPanel = kVectors * kLanes;

static_assert(kChunk % kPanel == 0, "a chunk is whole panels");

// Keys of a panel: token n * kLanes + i of dim d is vectors[n][d * stride + i]. Where `ahead` is given, what lies
// there in the same way is fetched meanwhile.
template <class T>
struct KeyVectors {
    const T* vectors[kVectors];
    const T* ahead[kVectors];
    int64_t stride;
};

// s[r][0 .. kPanel) = sum over d of q[r][d] * keys[..][d], d ascending.
template <int R, bool Ahead, class T>
void score_block(const float* q, int64_t q_stride, int64_t head_size, const KeyVectors<T>& keys, float* s) {
    constexpr int N = kVectors;
    Floats sums[R][N] = {};
    for (int64_t d = 0; d < head_size; ++d) {
        Floats k[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            k[n] = load(keys.vectors[n] + d * keys.stride);
            if constexpr (Ahead) prefetch(keys.ahead[n], d * keys.stride);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats x = splat(q[r * q_stride + d]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = fma(x, k[n], sums[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(s + r * kChunk + n * kLanes, sums[r][n]);
    }
}

// Value rows of a chunk, as they lie: token t is row t % rows_per_block of blocks[t / rows_per_block]. The block
// `ahead` further on is fetched meanwhile; 0: none is.
template <class T>
struct ValueRows {
    const T* const* blocks;
    int rows_per_block;
    int64_t stride;
    int ahead;
};

// o[r][0 .. N * kLanes) = sum over t in [first, last) of p[r][t] * values[t][offset ..], t ascending.
template <int R, int N, bool Ahead, class T>
void value_block(const float* p, const ValueRows<T>& values, int64_t offset, int first, int last, float* o,
                 int64_t o_stride) {
    Floats sums[R][N] = {};
    for (int t = first; t < last;) {
        const int block = t / values.rows_per_block;
        int64_t at = (t - block * values.rows_per_block) * values.stride + offset;
        const T* const v = values.blocks[block];
        const T* const next = values.blocks[block + values.ahead];
        const int stop = smaller(last, (block + 1) * values.rows_per_block);
        for (; t < stop; ++t, at += values.stride) {
            Floats x[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                x[n] = load(v + at + n * kLanes);
                if constexpr (Ahead) prefetch(next, at + n * kLanes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats w = splat(p[r * kChunk + t]);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sums[r][n] = fma(w, x[n], sums[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(o + r * o_stride + n * kLanes, sums[r][n]);
    }
}

template <bool Ahead, class T>
void score_rows(int rows, const float* q, int64_t q_stride, int64_t head_size, const KeyVectors<T>& keys, float* s) {
    switch (rows) {
        case 1: return score_block<1, Ahead>(q, q_stride, head_size, keys, s);
        case 2: return score_block<2, Ahead>(q, q_stride, head_size, keys, s);
        case 3: return score_block<3, Ahead>(q, q_stride, head_size, keys, s);
        case 4: return score_block<4, Ahead>(q, q_stride, head_size, keys, s);
        case 5: return score_block<5, Ahead>(q, q_stride, head_size, keys, s);
        default: return score_block<6, Ahead>(q, q_stride, head_size, keys, s);
    }
}

template <int N, bool Ahead, class T>
void value_rows(int rows, const float* p, const ValueRows<T>& values, int64_t offset, int first, int last, float* o,
                int64_t o_stride) {
    switch (rows) {
        case 1: return value_block<1, N, Ahead>(p, values, offset, first, last, o, o_stride);
        case 2: return value_block<2, N, Ahead>(p, values, offset, first, last, o, o_stride);
        case 3: return value_block<3, N, Ahead>(p, values, offset, first, last, o, o_stride);
        case 4: return value_block<4, N, Ahead>(p, values, offset, first, last, o, o_stride);
        case 5: return value_block<5, N, Ahead>(p, values, offset, first, last, o, o_stride);
        default: return value_block<6, N, Ahead>(p, values, offset, first, last, o, o_stride);
    }
}

template <bool Ahead, class T>
void value_columns(int vectors, int rows, const float* p, const ValueRows<T>& values, int64_t offset, int first,
                   int last, float* o, int64_t o_stride) {
    switch (vectors) {
        case 1: return value_rows<1, Ahead>(rows, p, values, offset, first, last, o, o_stride);
#if defined(__AVX512F__)
        case 2: return value_rows<2, Ahead>(rows, p, values, offset, first, last, o, o_stride);
        case 3: return value_rows<3, Ahead>(rows, p, values, offset, first, last, o, o_stride);
#endif
        default: return value_rows<kVectors, Ahead>(rows, p, values, offset, first, last, o, o_stride);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
