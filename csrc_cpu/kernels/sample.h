// Passes over a row of logits from which a token is chosen. A row is first made to be at most 0, as core does it:
// (logit - the largest) * factor, in float32. Its weights are e^ of that.
#pragma once

#include "numeric.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE Floats scaled(const LogitRow& r, Floats x) { return (x - r.top) * r.factor; }

// The largest; NaN does not count.
inline float row_top(const float* row, int64_t size) {
    constexpr int kChains = 4;
    const float none = -__builtin_inff();
    Floats top[kChains] = {splat(none), splat(none), splat(none), splat(none)};
    int64_t i = 0;
    for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
        for (int c = 0; c < kChains; ++c) top[c] = max(load(row + i + c * kLanes), top[c]);
    }
    float best = maximum(max(max(top[0], top[1]), max(top[2], top[3])));
    for (; i < size; ++i) best = row[i] > best ? row[i] : best;
    return best;
}

OCTAVO_INLINE float weigh_block(const LogitRow& r, const float* block) {
    Floats total = splat(0.0f);
    for (int v = 0; v < kSampleBlock; v += kLanes) {
        const Floats x = scaled(r, load(block + v)), weight = exp(x);
        total = total + (x < r.floor ? splat(0.0f) : weight);
    }
    return sum(total);
}

// The weights of each block of kSampleBlock, those below the floor left out, and of all; NaN where a logit is NaN,
// or the largest is infinite.
inline double weigh_row(const LogitRow& r, float* sums) {
    double total = 0;
    const int64_t whole = r.size / kSampleBlock;
    for (int64_t b = 0; b < whole; ++b) {
        sums[b] = weigh_block(r, r.data + b * kSampleBlock);
        total += sums[b];
    }
    if (r.size % kSampleBlock) {
        float rest[kSampleBlock];
        for (int i = 0; i < kSampleBlock; ++i) {
            rest[i] = i < r.size % kSampleBlock ? r.data[whole * kSampleBlock + i] : -__builtin_inff();
        }
        sums[whole] = weigh_block(r, rest);
        total += sums[whole];
    }
    return total;
}

// What is not below `lowest` of elements [begin, end), with the ids, ascending; how many there are.
inline int64_t gather_row(const LogitRow& r, int64_t begin, int64_t end, float lowest, float* values, int32_t* ids) {
    int64_t count = 0, i = begin;
    for (; i + kLanes <= end; i += kLanes) {
        const Floats x = scaled(r, load(r.data + i));
        uint32_t found = lanes_where(x >= lowest);
        if (!found) continue;
        float lanes[kLanes];
        store(lanes, x);
        for (; found; found &= found - 1) {
            const int lane = __builtin_ctz(found);
            values[count] = lanes[lane];
            ids[count++] = int32_t(i) + lane;
        }
    }
    for (; i < end; ++i) {
        const float x = (r.data[i] - r.top) * r.factor;
        if (x >= lowest) {
            values[count] = x;
            ids[count++] = int32_t(i);
        }
    }
    return count;
}

inline void weigh_values(const float* values, float* weights, int64_t count) {
    for_each_vector(count, [&](int64_t i, auto load, auto store)
                               OCTAVO_LAMBDA { store(weights + i, exp(load(values + i))); });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
