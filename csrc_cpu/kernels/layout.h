// How a block of the cache lies in memory, for the kernels and for those who call them.
//
// A block holds one part a KV head: [keys | values | scales]. Lanes are 32 bits wide and hold `packing` elements,
// so that products of pairs (bfloat16) or fours (int8) read them as they lie:
//   keys    [head_size / packing][block_size][packing]     a lane is some dims of one token; dims past the last are 0
//   values  [block_size / packing][value stride][packing]  a lane is one dim of some tokens
//   scales  of int8 alone: float [2][block_size], of each token's key and value
// float32 and float16 have packing 1. A latent cache holds [block_size][value stride] and nothing else.
//
// Functions are static, so that each translation unit keeps a copy of its own: see table.h.
#pragma once

#include "table.h"

namespace octavo {

static inline int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline int packing(const octavo_attention& g) {
    if (g.latent) return 1;
    return g.kv_dtype == OCTAVO_BFLOAT16 ? 2 : g.kv_dtype == OCTAVO_INT8 ? 4 : 1;
}

static inline int64_t value_stride(const octavo_attention& g) {
    return rounded_up(g.latent ? g.head_size : g.value_size, kValueAlign);
}

// Elements of one KV head's part: its keys, its values, all of it.
static inline int64_t key_elements(const octavo_attention& g) {
    return g.latent ? 0 : rounded_up(g.head_size, packing(g)) * g.block_size;
}
static inline int64_t value_elements(const octavo_attention& g) { return value_stride(g) * g.block_size; }
static inline int64_t head_elements(const octavo_attention& g) {
    const int64_t scales = g.kv_dtype == OCTAVO_INT8 ? 2 * int64_t(sizeof(float)) * g.block_size : 0;
    return key_elements(g) + value_elements(g) + scales;
}

}  // namespace octavo
