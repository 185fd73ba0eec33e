// The two products of attention on lanes of two bfloat16 or four int8, as the cache holds them (AVX-512 with bf16 and
// VNNI).
//
// bfloat16: queries are bfloat16 already, weights are rounded to it; sums are floats.
// int8: a query row is two rows of int8, 128 * high + low with a scale, weights are two rows of uint8, 256 * high +
// low with a scale, so that both keep fifteen bits; sums are whole numbers, exact in any order.
#pragma once

#include "cache.h"
#include "softmax.h"

#if defined(OCTAVO_PACKED_PRODUCTS)

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kPackedRows = 6, kPackedVectors = 4;  // of a register block
constexpr int kPackedPanel = kPackedVectors * kLanes;

struct Pairs {
    typedef BFloat16 Element;
    typedef __m512 Sum;
    static constexpr int kPack = 2;
    static constexpr int kParts = 1;  // rows of the products that are one row of the query or of the weights

    static OCTAVO_INLINE Sum start(int32_t) { return _mm512_setzero_ps(); }
    static OCTAVO_INLINE __m512i key(__m512i lanes) { return lanes; }
    static OCTAVO_INLINE Sum add_key(Sum sum, __m512i key, __m512i query) {
        return _mm512_dpbf16_ps(sum, (__m512bh)key, (__m512bh)query);
    }
    static OCTAVO_INLINE Sum add_value(Sum sum, __m512i value, __m512i weight) {
        return _mm512_dpbf16_ps(sum, (__m512bh)value, (__m512bh)weight);
    }
    static OCTAVO_INLINE __m512 score(const Sum* sum) { return sum[0]; }
    static OCTAVO_INLINE __m512 out(const Sum* sum, int64_t, float) { return sum[0]; }
};

struct Fours {
    typedef Int8 Element;
    typedef __m512i Sum;
    static constexpr int kPack = 4;
    static constexpr int kParts = 2;

    static OCTAVO_INLINE Sum start(int32_t offset) { return _mm512_set1_epi32(offset); }
    // The instruction takes one operand unsigned: keys + 128; a row's sum starts at what that adds too much.
    static OCTAVO_INLINE __m512i key(__m512i lanes) { return _mm512_xor_si512(lanes, _mm512_set1_epi8(-128)); }
    static OCTAVO_INLINE Sum add_key(Sum sum, __m512i key, __m512i query) {
        return _mm512_dpbusd_epi32(sum, key, query);
    }
    static OCTAVO_INLINE Sum add_value(Sum sum, __m512i value, __m512i weight) {
        return _mm512_dpbusd_epi32(sum, weight, value);
    }
    static OCTAVO_INLINE __m512 score(const Sum* sum) { return join(sum[0], sum[kPackedVectors], 128.0f); }
    static OCTAVO_INLINE __m512 out(const Sum* sum, int64_t vectors, float scale) {
        return _mm512_mul_ps(join(sum[0], sum[vectors], 256.0f), _mm512_set1_ps(scale));
    }
    // Each part is exact as a float.
    static OCTAVO_INLINE __m512 join(Sum high, Sum low, float base) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(base), _mm512_cvtepi32_ps(low));
    }
};

// Keys of a panel, by vector: 16 lanes at low[n], or 8 there and 8 at high[n]; further dims are `stride` bytes apart.
struct KeyLanes {
    const char *low[kPackedVectors], *high[kPackedVectors];
    int64_t stride;
};

// A tile's queries as packed rows, kParts each.
struct PackedQuery {
    const uint32_t* words;  // [rows * kParts][lanes]
    const int32_t* start;   // [rows * kParts], int8 alone
    int64_t lanes;          // of a head: head_size / kPack, rounded up
};

// s[r][0 .. kPackedPanel) of R packed rows.
template <class Dot, int R, bool Halves, class F>
void packed_score_block(const PackedQuery& q, int row, const KeyLanes& keys, float* s, F& fetch) {
    constexpr int N = kPackedVectors;
    const uint32_t* const words = q.words + row * q.lanes;
    typename Dot::Sum sums[R * N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[r * N + n] = Dot::start(Dot::kParts > 1 ? q.start[row + r] : 0);
    }
    for (int64_t d = 0; d < q.lanes; ++d) {
        __m512i k[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const char* const low = keys.low[n] + d * keys.stride;
            if constexpr (Halves) {
                const __m256i high = _mm256_loadu_si256((const __m256i*)(keys.high[n] + d * keys.stride));
                k[n] = Dot::key(_mm512_inserti64x4(
                    _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)low)), high, 1));
            } else {
                k[n] = Dot::key(_mm512_loadu_si512(low));
            }
        }
        fetch.step();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i x = _mm512_set1_epi32(int(words[r * q.lanes + d]));
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r * N + n] = Dot::add_key(sums[r * N + n], k[n], x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r += Dot::kParts) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            _mm512_storeu_ps(s + r / Dot::kParts * kChunk + n * kLanes, Dot::score(sums + r * N + n));
        }
    }
}

// Weights of a tile's rows.
struct PackedWeights {
    const uint32_t* words;  // [rows * kParts][kChunk / kPack]
    const float* scales;    // [rows], int8 alone
};

// o[r][0 .. N * kLanes) of R packed rows: sums over the range's tokens of weights * values. `offset`: bytes to the
// first dim.
template <class Dot, int R, int N, class F>
void packed_value_block(const PackedWeights& p, int row, const octavo_attention& g,
                        const typename Dot::Element* const* blocks, int64_t offset, const ChunkRange& range, float* o,
                        int64_t o_stride, F& fetch) {
    constexpr int P = Dot::kPack, W = kChunk / P;
    const uint32_t* const words = p.words + row * W;
    const int64_t stride = value_stride(g) * 4;
    const int per_block = g.block_size / P;
    typename Dot::Sum sums[R * N];
#pragma GCC unroll 8
    for (int i = 0; i < R * N; ++i) sums[i] = Dot::start(0);
    // Where pairs reach out of the range at an end, the element there is perhaps NaN, which a weight of zero does not
    // undo. Codes are finite whatever they are.
    const int low_edge = P == 2 && range.first % 2 ? range.first / 2 : -1;
    const int high_edge = P == 2 && range.last % 2 ? range.last / 2 : -1;
    for (int lane = range.first / P, end = (range.last + P - 1) / P; lane < end;) {
        const int block = lane / per_block, stop = smaller(end, (block + 1) * per_block);
        const char* v = reinterpret_cast<const char*>(blocks[block]) + (lane - block * per_block) * stride + offset;
        for (; lane < stop; ++lane, v += stride) {
            __m512i x[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) x[n] = _mm512_loadu_si512(v + n * 64);
            if (P == 2 && __builtin_expect(lane == low_edge || lane == high_edge, 0)) {
                const __m512i keep = _mm512_set1_epi32(lane == low_edge ? int(0xffff0000u) : 0x0000ffff);
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) x[n] = _mm512_and_si512(x[n], keep);
            }
            fetch.step();
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i w = _mm512_set1_epi32(int(words[r * W + lane]));
#pragma GCC unroll 8
                for (int n = 0; n < N; ++n) sums[r * N + n] = Dot::add_value(sums[r * N + n], x[n], w);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r += Dot::kParts) {
        const float scale = Dot::kParts > 1 ? p.scales[(row + r) / Dot::kParts] : 1.0f;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            _mm512_storeu_ps(o + r / Dot::kParts * o_stride + n * kLanes, Dot::out(sums + r * N + n, N, scale));
        }
    }
}

template <class Dot, bool Halves, class F>
void packed_scores(int rows, const PackedQuery& q, int row, const KeyLanes& keys, float* s, F& fetch) {
    if constexpr (Dot::kParts == 1) {
        switch (rows) {
            case 1: return packed_score_block<Dot, 1, Halves>(q, row, keys, s, fetch);
            case 3: return packed_score_block<Dot, 3, Halves>(q, row, keys, s, fetch);
            case 5: return packed_score_block<Dot, 5, Halves>(q, row, keys, s, fetch);
        }
    }
    switch (rows) {
        case 2: return packed_score_block<Dot, 2, Halves>(q, row, keys, s, fetch);
        case 4: return packed_score_block<Dot, 4, Halves>(q, row, keys, s, fetch);
        default: return packed_score_block<Dot, 6, Halves>(q, row, keys, s, fetch);
    }
}

template <class Dot, int N, class F>
void packed_values(int rows, const PackedWeights& p, int row, const octavo_attention& g,
                   const typename Dot::Element* const* blocks, int64_t offset, const ChunkRange& range, float* o,
                   int64_t o_stride, F& fetch) {
    if constexpr (Dot::kParts == 1) {
        switch (rows) {
            case 1: return packed_value_block<Dot, 1, N>(p, row, g, blocks, offset, range, o, o_stride, fetch);
            case 3: return packed_value_block<Dot, 3, N>(p, row, g, blocks, offset, range, o, o_stride, fetch);
            case 5: return packed_value_block<Dot, 5, N>(p, row, g, blocks, offset, range, o, o_stride, fetch);
        }
    }
    switch (rows) {
        case 2: return packed_value_block<Dot, 2, N>(p, row, g, blocks, offset, range, o, o_stride, fetch);
        case 4: return packed_value_block<Dot, 4, N>(p, row, g, blocks, offset, range, o, o_stride, fetch);
        default: return packed_value_block<Dot, 6, N>(p, row, g, blocks, offset, range, o, o_stride, fetch);
    }
}

// ---- queries

OCTAVO_INLINE void pack_query(Pairs, const BFloat16* x, int64_t size, int row, uint32_t* words, int32_t*, float*) {
    const int64_t lanes = (size + 1) / 2;
    words += row * lanes;
    words[lanes - 1] = 0;
    std::memcpy(words, x, size_t(size) * sizeof(BFloat16));
}

// 128 * high + low nearest to x * 16256 / the largest.
template <class A>
OCTAVO_INLINE void pack_query(Fours, const A* x, int64_t size, int row, uint32_t* words, int32_t* start, float* scale) {
    const int64_t lanes = (size + 3) / 4;
    uint32_t* const parts[2] = {words + 2 * row * lanes, words + (2 * row + 1) * lanes};
    __m512i top = _mm512_setzero_si512();
    for_each_vector(size, [&](int64_t d, auto get, auto) OCTAVO_LAMBDA {
        top = _mm512_max_epu32(top, _mm512_and_si512((__m512i)get(x + d), _mm512_set1_epi32(0x7fffffff)));
    });
    const uint32_t bits = _mm512_reduce_max_epu32(top);
    float largest;
    std::memcpy(&largest, &bits, sizeof bits);
    *scale = largest / 16256.0f;  // NaN where x has one
    const float inverse = largest > 1e-30f ? 16256.0f / largest : 0.0f;
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for_each_vector(size, [&](int64_t d, auto get, auto) OCTAVO_LAMBDA {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)get(x + d), _mm512_set1_ps(inverse)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 7));
        const auto mask = __mmask16((1u << smaller<int64_t>(16, (size - d + 3) / 4 * 4)) - 1);
        _mm512_mask_cvtepi32_storeu_epi8(reinterpret_cast<char*>(parts[0]) + d, mask, high);
        _mm512_mask_cvtepi32_storeu_epi8(reinterpret_cast<char*>(parts[1]) + d, mask, low);
        sums[0] = _mm512_add_epi32(sums[0], high);
        sums[1] = _mm512_add_epi32(sums[1], low);
    });
    for (int i = 0; i < 2; ++i) start[2 * row + i] = -128 * _mm512_reduce_add_epi32(sums[i]);
}

// ---- weights

// 2^x for x <= 0, to a twentieth of bfloat16's rounding: enough where the weight is rounded to it.
OCTAVO_INLINE __m512 exp2_short(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 p = _mm512_set1_ps(0.078024505f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.22606718f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69583353f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992522f));
    return _mm512_scalef_ps(p, x);  // takes the floor itself
}

constexpr int kChunkVectors = kChunk / kLanes;

// Lanes of vector v that are in [low, high).
OCTAVO_INLINE __mmask16 lanes_in(int v, int low, int high) {
    const int from = smaller(kLanes, larger(0, low - v * kLanes)), to = smaller(kLanes, larger(0, high - v * kLanes));
    return __mmask16(((1u << to) - 1) & ~((1u << from) - 1));
}

// A row's scores in units of ln 2, those outside [low, high) kNone; returns the largest.
template <bool Whole>
OCTAVO_INLINE float load_scores(const float* s, const Seen& seen, const float* key_scales, __m512 x[kChunkVectors]) {
    const __m512 none = _mm512_set1_ps(kNone), scale = _mm512_set1_ps(seen.scale * kLog2E);
#pragma GCC unroll 8
    for (int v = 0; v < kChunkVectors; ++v) {
        if constexpr (Whole) {
            x[v] = _mm512_mul_ps(_mm512_loadu_ps(s + v * kLanes), scale);
            if (key_scales) x[v] = _mm512_mul_ps(x[v], _mm512_loadu_ps(key_scales + v * kLanes));
        } else {
            const __mmask16 mask = lanes_in(v, seen.low, seen.high);
            x[v] = _mm512_mask_mul_ps(none, mask, _mm512_maskz_loadu_ps(mask, s + v * kLanes), scale);
            if (key_scales) {
                x[v] = _mm512_mask_mul_ps(none, mask, x[v], _mm512_maskz_loadu_ps(mask, key_scales + v * kLanes));
            }
        }
    }
    __m512 top = x[0];
#pragma GCC unroll 8
    for (int v = 1; v < kChunkVectors; ++v) top = _mm512_max_ps(top, x[v]);
    return _mm512_reduce_max_ps(top);
}

// The weight of vector v, 0 exactly outside [low, high).
template <bool Whole>
OCTAVO_INLINE __m512 weight(const __m512* x, int v, const Seen& seen, __m512 top) {
    const __m512 y = exp2_short(_mm512_sub_ps(x[v], top));
    return Whole ? y : _mm512_maskz_mov_ps(lanes_in(v, seen.low, seen.high), y);
}

template <bool Whole>
OCTAVO_INLINE void soften_packed(Pairs, const float* s, const Seen& seen, const TokenScales&, uint32_t* words, float*,
                                 float& row_max, float& row_sum) {
    __m512 x[kChunkVectors];
    row_max = load_scores<Whole>(s, seen, nullptr, x);
    const __m512 top = _mm512_set1_ps(row_max);
    __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int v = 0; v < kChunkVectors; v += 2) {
        const __m512bh p = _mm512_cvtne2ps_pbh(weight<Whole>(x, v + 1, seen, top), weight<Whole>(x, v, seen, top));
        _mm512_storeu_si512(words + v * (kLanes / 2), (__m512i)p);
        // The sum is of the weights as they are rounded.
        total = _mm512_dpbf16_ps(total, p, (__m512bh)_mm512_set1_epi32(0x3f803f80));
    }
    row_sum = _mm512_reduce_add_ps(total);
}

template <bool Whole>
OCTAVO_INLINE void soften_packed(Fours, const float* s, const Seen& seen, const TokenScales& scales, uint32_t* words,
                                 float* weight_scale, float& row_max, float& row_sum) {
    __m512 x[kChunkVectors];
    row_max = load_scores<Whole>(s, seen, scales.keys, x);
    const __m512 top = _mm512_set1_ps(row_max);
    __m512 total = _mm512_setzero_ps();
    __m512i largest = _mm512_setzero_si512();  // bits of floats >= 0 are ordered as they are, NaN above them
#pragma GCC unroll 8
    for (int v = 0; v < kChunkVectors; ++v) {
        const __m512 p = weight<Whole>(x, v, seen, top);
        total = _mm512_add_ps(total, p);
        const __mmask16 mask = Whole ? __mmask16(-1) : lanes_in(v, seen.low, seen.high);
        x[v] = _mm512_maskz_mul_ps(mask, p, _mm512_maskz_loadu_ps(mask, scales.values + v * kLanes));
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(x[v]));
    }
    row_sum = _mm512_reduce_add_ps(total);
    const uint32_t bits = _mm512_reduce_max_epu32(largest);
    float size_of_largest;
    std::memcpy(&size_of_largest, &bits, sizeof bits);
    *weight_scale = size_of_largest / 65280.0f;
    const __m512 inverse = _mm512_set1_ps(size_of_largest > 1e-30f ? 65280.0f / size_of_largest : 0.0f);
    char* const high = reinterpret_cast<char*>(words);
#pragma GCC unroll 8
    for (int v = 0; v < kChunkVectors; ++v) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x[v], inverse));
        _mm_storeu_si128((__m128i*)(high + v * kLanes), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
        _mm_storeu_si128((__m128i*)(high + kChunk + v * kLanes), _mm512_cvtepi32_epi8(whole));
    }
}

// Where rows' scores and weights lie.
struct SoftRows {
    float* scores;
    int64_t score_stride;
    uint32_t* weights;
    int64_t weight_stride;
};

// Whether a row sees all of a chunk, its scores as they are.
OCTAVO_INLINE bool sees_all(const Seen& seen) { return seen.low == 0 && seen.high == kChunk && seen.softcap == 0.0f; }

// Two rows that see all of a chunk: as one by one, but neither waits for the other.
OCTAVO_INLINE void soften_two(Pairs, const SoftRows& rows, const Seen& seen, float* row_max, float* row_sum) {
    constexpr int kTwo = 2;
    const __m512 scale = _mm512_set1_ps(seen.scale * kLog2E);
    __m512 x[kTwo][kChunkVectors], top[kTwo], total[kTwo];
#pragma GCC unroll 8
    for (int v = 0; v < kChunkVectors; ++v) {
#pragma GCC unroll 2
        for (int r = 0; r < kTwo; ++r) {
            x[r][v] = _mm512_mul_ps(_mm512_loadu_ps(rows.scores + r * rows.score_stride + v * kLanes), scale);
            top[r] = v == 0 ? x[r][0] : _mm512_max_ps(top[r], x[r][v]);
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kTwo; ++r) {
        row_max[r] = _mm512_reduce_max_ps(top[r]);
        top[r] = _mm512_set1_ps(row_max[r]);
        total[r] = _mm512_setzero_ps();
    }
#pragma GCC unroll 8
    for (int v = 0; v < kChunkVectors; v += 2) {
#pragma GCC unroll 2
        for (int r = 0; r < kTwo; ++r) {
            const __m512bh p = _mm512_cvtne2ps_pbh(weight<true>(x[r], v + 1, seen, top[r]),
                                                   weight<true>(x[r], v, seen, top[r]));
            _mm512_storeu_si512(rows.weights + r * rows.weight_stride + v * (kLanes / 2), (__m512i)p);
            total[r] = _mm512_dpbf16_ps(total[r], p, (__m512bh)_mm512_set1_epi32(0x3f803f80));
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kTwo; ++r) row_sum[r] = _mm512_reduce_add_ps(total[r]);
}

// Caps a row's scores in place; what is left to do is to multiply by 1.
OCTAVO_INLINE void cap_scores(float* s, const ChunkRange& range, const Seen& seen, const float* key_scales) {
    for (int at = range.first / kLanes * kLanes; at < range.last; at += kLanes) {
        Floats x = load(s + at);
        if (key_scales) x *= load(key_scales + at);
        store(s + at, tanh(x * (seen.scale / seen.softcap)) * seen.softcap);
    }
}

// Scores of one row to weights, all of the chunk.
template <class Dot>
OCTAVO_INLINE void soften_packed_row(Dot dot, const SoftRows& row, const ChunkRange& range, Seen seen,
                                     TokenScales scales, float* weight_scale, float& row_max, float& row_sum) {
    if (seen.softcap > 0.0f) {
        cap_scores(row.scores, range, seen, scales.keys);
        seen.scale = 1.0f;
        scales.keys = nullptr;
    }
    if (seen.low == 0 && seen.high == kChunk) {
        soften_packed<true>(dot, row.scores, seen, scales, row.weights, weight_scale, row_max, row_sum);
    } else {
        soften_packed<false>(dot, row.scores, seen, scales, row.weights, weight_scale, row_max, row_sum);
    }
    if (row_max == kNone) {  // nothing is seen
        std::memset(row.weights, 0, kChunk / Dot::kPack * 4 * Dot::kParts);
        row_sum = 0.0f;
        if (weight_scale) *weight_scale = 0.0f;
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
