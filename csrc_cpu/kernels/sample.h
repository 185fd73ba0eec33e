// Passes over a row of logits from which a token is chosen: scores, weights and their sums, all of which the contract's
// op `sample` defines to the bit. Scores are at most 0; weights are whole numbers, so that sums have no order. Every
// operation in float32 is rounded by itself: no fma here.
#pragma once

#include "simd.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE Floats score(const LogitRow& r, Floats x) { return (x - r.top) * r.factor; }
OCTAVO_INLINE float score(const LogitRow& r, float x) { return (x - r.top) * r.factor; }

// 2^40 times 2^score.
OCTAVO_INLINE LongPair weights_of(Floats score) {
    const float magic = 0x1.8p23f, one = 0x1p40f;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const Floats x = max(score, splat(-64.0f)), shifted = x + magic, f = x - (shifted - magic);
    Floats p = splat(0x1.5bba14p-10f * one);
    p = p * f + 0x1.3cea88p-7f * one;
    p = p * f + 0x1.c6b752p-5f * one;
    p = p * f + 0x1.ebf9bcp-3f * one;
    p = p * f + 0x1.62e42ap-1f * one;
    p = p * f + one;
    return to_longs((Floats)((Ints)p + ((Ints)shifted << 23)));
}

OCTAVO_INLINE LongPair weights_of(Floats score, int64_t least) {
    LongPair w = weights_of(score);
    w.low = w.low >= least ? w.low : Longs{};
    w.high = w.high >= least ? w.high : Longs{};
    return w;
}

// The elements of a block, those past the end of the row -inf.
struct LastBlock {
    float values[kSampleBlock];

    LastBlock(const float* row, int64_t begin, int64_t size) {
        for (int64_t i = 0; i < kSampleBlock; ++i) values[i] = begin + i < size ? row[begin + i] : -__builtin_inff();
    }
};

// The largest of each block of kSampleBlock and of all; NaN where an element is NaN.
inline float survey_row(const float* row, int64_t size, float* tops) {
    float best = -__builtin_inff();
    bool odd = false;
    const auto survey = [&](const float* block) OCTAVO_LAMBDA {
        Floats a = splat(-__builtin_inff()), b = a;
        for (int v = 0; v < kSampleBlock; v += 2 * kLanes) {
            const Floats x = load(block + v), y = load(block + v + kLanes);
            odd |= any_nan(x, y);
            a = max(x, a);
            b = max(y, b);
        }
        const float top = maximum(max(a, b));
        best = top > best ? top : best;
        return top;
    };
    const int64_t whole = size / kSampleBlock;
    for (int64_t b = 0; b < whole; ++b) tops[b] = survey(row + b * kSampleBlock);
    if (size % kSampleBlock) tops[whole] = survey(LastBlock(row, whole * kSampleBlock, size).values);
    return odd ? __builtin_nanf("") : best;
}

template <bool Least>
OCTAVO_INLINE int64_t weigh_block(const LogitRow& r, const float* block) {
    Longs low = {}, high = {};
    for (int v = 0; v < kSampleBlock; v += kLanes) {
        const Floats x = score(r, load(block + v));
        const LongPair w = Least ? weights_of(x, r.least) : weights_of(x);
        low += w.low;
        high += w.high;
    }
    return sum(low + high);
}

template <bool Least>
int64_t weigh_blocks(const LogitRow& r, int64_t* sums) {
    int64_t total = 0;
    const int64_t whole = r.size / kSampleBlock;
    for (int64_t b = 0; b < whole; ++b) total += sums[b] = weigh_block<Least>(r, r.data + b * kSampleBlock);
    if (r.size % kSampleBlock) {
        total += sums[whole] = weigh_block<Least>(r, LastBlock(r.data, whole * kSampleBlock, r.size).values);
    }
    return total;
}

// The weights of each block and of all; what weighs less than `least` counts for nothing.
inline int64_t weigh_row(const LogitRow& r, int64_t* sums) {
    return r.least > 1 ? weigh_blocks<true>(r, sums) : weigh_blocks<false>(r, sums);
}

// Scores not below `lowest` of blocks [begin, end), with the ids, ascending; how many there are. Writes up to
// kSampleSlack beyond those.
inline int64_t gather_row(const LogitRow& r, int64_t begin, int64_t end, float lowest, float* scores, int32_t* ids) {
    int64_t count = 0;
    for (int64_t b = begin; b < end; ++b) {
        if (score(r, r.tops[b]) < lowest) continue;
        const int64_t first = b * kSampleBlock, last = smaller(r.size, first + kSampleBlock);
        int64_t i = first;
        for (; i + kLanes <= last; i += kLanes) {
            const Floats x = score(r, load(r.data + i));
            count += store_from(lowest, x, int32_t(i), scores + count, ids + count);
        }
        for (; i < last; ++i) {
            const float x = score(r, r.data[i]);
            if (x >= lowest) {
                scores[count] = x;
                ids[count++] = int32_t(i);
            }
        }
    }
    return count;
}

// Of scores as gathered. Reads and writes up to kSampleSlack beyond them.
inline void weigh_scores(const float* scores, int64_t count, int64_t least, int64_t* weights) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats x = i + kLanes <= count ? load(scores + i) : load_first(scores + i, count - i);
        const LongPair w = weights_of(x, least);
        std::memcpy(weights + i, &w, sizeof w);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
