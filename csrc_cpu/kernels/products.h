// The two products of attention in floats, on register blocks: queries times keys, weights times values.
//
// Each sum runs over its own dims or positions in ascending order, whatever block it is computed in.
#pragma once

#include "cache.h"

namespace octavo {
namespace OCTAVO_ISA {

// Rows and vectors of one register block.
constexpr int kRows = 6, kVectors = kRegisters == 32 ? 4 : 2;
constexpr int kPanel = kVectors * kLanes;

static_assert(kChunk % kPanel == 0, "a chunk is whole panels");

// Keys of a panel: token n * kLanes + i of dim d is part d % P of lane i at vectors[n] + d / P * stride.
template <class T>
struct KeyVectors {
    const T* vectors[kVectors];
    int64_t stride;
};

// s[r][0 .. kPanel) = sum over d of q[r][d] * keys[..][d], d ascending.
template <int R, int P, class T, class F>
void score_block(const float* q, int64_t q_stride, int64_t head_size, const KeyVectors<T>& keys, float* s,
                 F& fetch) {
    constexpr int N = kVectors;
    Floats sums[R][N] = {};
    for (int64_t lane = 0; lane * P < head_size; ++lane) {
#pragma GCC unroll 4
        for (int part = 0; part < P; ++part) {  // known parts: shifts by constants
            const int64_t d = lane * P + part;
            if (P > 1 && d >= head_size) break;
            Floats k[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) k[n] = load_part<P>(keys.vectors[n] + lane * keys.stride, part);
            fetch.step();
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats x = splat(q[r * q_stride + d]);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sums[r][n] = fma(x, k[n], sums[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(s + r * kChunk + n * kLanes, sums[r][n]);
    }
}

// Value rows of a chunk, as they lie: token t is part t % P of row (t % rows_per_block) / P of
// blocks[t / rows_per_block]; `stride` elements a row.
template <class T>
struct ValueRows {
    const T* const* blocks;
    int rows_per_block;
    int64_t stride;
};

// o[r][0 .. N * kLanes) = sum over t in [first, last) of p[r][t] * values[t][offset ..], t ascending.
template <int R, int N, int P, class T, class F>
void value_block(const float* p, const ValueRows<T>& values, int64_t offset, int first, int last, float* o,
                 int64_t o_stride, F& fetch) {
    Floats sums[R][N] = {};
    for (int t = first; t < last;) {
        const int block = t / values.rows_per_block;
        const T* const v = values.blocks[block] + offset * P;
        const int stop = smaller(last, (block + 1) * values.rows_per_block);
        for (t = t / P * P; t < stop; t += P) {
            const T* const lanes = v + (t - block * values.rows_per_block) / P * values.stride;
#pragma GCC unroll 4
            for (int part = 0; part < P; ++part) {
                if (P > 1 && (t + part < first || t + part >= stop)) continue;
                Floats x[N];
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) x[n] = load_part<P>(lanes + n * kLanes * P, part);
                fetch.step();
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const Floats w = splat(p[r * kChunk + t + part]);
#pragma GCC unroll 8
                    for (int n = 0; n < N; ++n) sums[r][n] = fma(w, x[n], sums[r][n]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(o + r * o_stride + n * kLanes, sums[r][n]);
    }
}

template <int P, class T, class F>
void score_rows(int rows, const float* q, int64_t q_stride, int64_t head_size, const KeyVectors<T>& keys, float* s,
                F& fetch) {
    switch (rows) {
        case 1: return score_block<1, P>(q, q_stride, head_size, keys, s, fetch);
        case 2: return score_block<2, P>(q, q_stride, head_size, keys, s, fetch);
        case 3: return score_block<3, P>(q, q_stride, head_size, keys, s, fetch);
        case 4: return score_block<4, P>(q, q_stride, head_size, keys, s, fetch);
        case 5: return score_block<5, P>(q, q_stride, head_size, keys, s, fetch);
        default: return score_block<6, P>(q, q_stride, head_size, keys, s, fetch);
    }
}

template <int N, int P, class T, class F>
void value_rows(int rows, const float* p, const ValueRows<T>& values, int64_t offset, int first, int last, float* o,
                int64_t o_stride, F& fetch) {
    switch (rows) {
        case 1: return value_block<1, N, P>(p, values, offset, first, last, o, o_stride, fetch);
        case 2: return value_block<2, N, P>(p, values, offset, first, last, o, o_stride, fetch);
        case 3: return value_block<3, N, P>(p, values, offset, first, last, o, o_stride, fetch);
        case 4: return value_block<4, N, P>(p, values, offset, first, last, o, o_stride, fetch);
        case 5: return value_block<5, N, P>(p, values, offset, first, last, o, o_stride, fetch);
        default: return value_block<6, N, P>(p, values, offset, first, last, o, o_stride, fetch);
    }
}

template <int P, class T, class F>
void value_columns(int vectors, int rows, const float* p, const ValueRows<T>& values, int64_t offset, int first,
                   int last, float* o, int64_t o_stride, F& fetch) {
    switch (vectors) {
        case 1: return value_rows<1, P>(rows, p, values, offset, first, last, o, o_stride, fetch);
        case 2: return value_rows<2, P>(rows, p, values, offset, first, last, o, o_stride, fetch);
        case 3:
            if constexpr (kVectors > 3) {
                return value_rows<3, P>(rows, p, values, offset, first, last, o, o_stride, fetch);
            }
            [[fallthrough]];
        default: return value_rows<kVectors, P>(rows, p, values, offset, first, last, o, o_stride, fetch);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
