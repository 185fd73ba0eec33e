// Scores to weights. Maxima are of scores in units of ln 2, so that weights are powers of two.
#pragma once

#include "numeric.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kNone = -__builtin_inff();  // the maximum of no scores
constexpr float kLog2E = 1.44269504f;

// 2^x to about one unit in the last place; 0 where the result would be subnormal. For x up to 126.
OCTAVO_INLINE Floats exp2(Floats x) {
    const float lowest = -126.0f, magic = 0x1.8p23f;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const Floats c = max(splat(lowest), x), shifted = c + magic;
    const Floats f = c - (shifted - magic);
    Floats p = splat(1.54035304e-4f);
    p = fma(p, f, splat(1.33335581e-3f));
    p = fma(p, f, splat(9.61812911e-3f));
    p = fma(p, f, splat(5.55041087e-2f));
    p = fma(p, f, splat(2.40226507e-1f));
    p = fma(p, f, splat(6.93147181e-1f));
    p = fma(p, f, splat(1.0f));
    const Ints n = (Ints)shifted - 0x4b400000;
    const Floats y = p * (Floats)((n + 127) << 23);
    return x < lowest ? splat(0.0f) : y;
}
OCTAVO_INLINE float exp2(float x) { return exp2(splat(x))[0]; }

// Positions of a chunk that a row sees, [low, high), and what its scores are multiplied by.
struct Seen {
    int low, high;
    float scale, softcap;
};

// Of int8 keys and values, a token each; null where there are none.
struct TokenScales {
    float *keys, *values;
};

// A row's scores, capped where they are, times log2 e: over vectors [first_vector, last_vector), in place.
OCTAVO_INLINE Floats scaled_score(const float* s, int at, const Seen& seen, const TokenScales& scales) {
    Floats x = load(s + at);
    if (scales.keys) x *= load(scales.keys + at);
    if (seen.softcap > 0.0f) return tanh(x * (seen.scale / seen.softcap)) * (seen.softcap * kLog2E);
    return x * (seen.scale * kLog2E);
}

// Scores to weights of one row, in place, over vectors [first_vector, last_vector) of the chunk. Positions outside
// [low, high) get weight 0 exactly. The sum is of the weights before values' scales are in them.
OCTAVO_INLINE void soften_row(float* s, int first_vector, int last_vector, const Seen& seen, const TokenScales& scales,
                              float& row_max, float& row_sum) {
    row_max = kNone;
    row_sum = 0.0f;
    Ints lane = splat(0);
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    if (seen.low < seen.high) {
        Ints position = lane + first_vector * kLanes;
        Floats top = splat(kNone);
        for (int v = first_vector; v < last_vector; ++v, position += kLanes) {
            Floats x = scaled_score(s, v * kLanes, seen, scales);
            x = position < seen.low ? splat(kNone) : x;
            x = position >= seen.high ? splat(kNone) : x;
            store(s + v * kLanes, x);
            top = max(top, x);
        }
        row_max = maximum(top);
    }
    if (row_max == kNone) {
        for (int v = first_vector; v < last_vector; ++v) store(s + v * kLanes, splat(0.0f));
        return;
    }
    Floats total = splat(0.0f);
    Ints position = lane + first_vector * kLanes;
    for (int v = first_vector; v < last_vector; ++v, position += kLanes) {
        Floats p = exp2(load(s + v * kLanes) - row_max);
        total += p;
        if (scales.values) {  // of a token that nobody wrote it may be NaN
            p *= load(scales.values + v * kLanes);
            p = position < seen.low ? splat(0.0f) : p;
            p = position >= seen.high ? splat(0.0f) : p;
        }
        store(s + v * kLanes, p);
    }
    row_sum = sum(total);
}

// Running state of a tile's rows: maximum, sum and weighted values [rows][stride].
struct RowSums {
    float *max, *sum, *out;
};

OCTAVO_INLINE void clear_rows(int rows, int64_t stride, const RowSums& to) {
    for (int r = 0; r < rows; ++r) {
        to.max[r] = kNone;
        to.sum[r] = 0.0f;
        for (int64_t d = 0; d < stride; d += kLanes) store(to.out + r * stride + d, splat(0.0f));
    }
}

// Folds a chunk's sums into the running ones. Both are padded to whole vectors of rows.
OCTAVO_INLINE void fold_rows(int rows, int64_t stride, const RowSums& to, const RowSums& chunk) {
    for (int begin = 0; begin < rows; begin += kLanes) {
        const int end = smaller(rows, begin + kLanes), n = end - begin;
        const Floats old_max = n == kLanes ? load(to.max + begin) : load_first(to.max + begin, n);
        const Floats new_max = n == kLanes ? load(chunk.max + begin) : load_first(chunk.max + begin, n);
        const Floats top = max(old_max, new_max);
        const Floats keep = old_max == kNone ? splat(0.0f) : exp2(old_max - top);
        const Floats add = exp2(new_max - top);
        float keeps[kLanes], adds[kLanes], tops[kLanes];
        store(keeps, keep);
        store(adds, add);
        store(tops, top);
        for (int r = begin; r < end; ++r) {
            if (chunk.max[r] == kNone) continue;
            to.max[r] = tops[r - begin];
            to.sum[r] = to.sum[r] * keeps[r - begin] + chunk.sum[r] * adds[r - begin];
            const Floats k = splat(keeps[r - begin]), x = splat(adds[r - begin]);
            float* o = to.out + r * stride;
            const float* c = chunk.out + r * stride;
            for (int64_t d = 0; d < stride; d += kLanes) store(o + d, fma(load(c + d), x, load(o + d) * k));
        }
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
