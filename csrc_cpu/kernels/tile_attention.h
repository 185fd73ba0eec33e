// The two products of attention on AMX tiles, which read keys and values as the cache holds them.
//
// In C += A * B a row of A holds 16 words of two bfloat16 or four int8, a row of B one such word for each of 16
// columns:
//   scores   A: queries [rows][16 words of dims]      B: keys [16 words of dims][16 tokens]      C: [rows][16 tokens]
//   values   A: weights [rows][16 words of tokens]    B: values [16 words of tokens][16 dims]    C: [rows][16 dims]
// A row of C comes of its row of A alone, by the same steps whatever the number of rows, and a product with a weight of
// zero changes no sum: so a row has the same bits in any tile. B must hold no NaN behind a weight of zero, so of tokens
// out of reach there are zeros in a copy.
//
// A tile's packed rows are taken in strips of up to 16. While the rows of one are softened, which is vector work, the
// processor multiplies for those beside it: scores of the strip after it, weighted values of the strip before.
#pragma once

#include "packed.h"
#include "tiles.h"

#if defined(OCTAVO_TILES)

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kStepWords = kTileRowBytes / 4;  // that a product sums
constexpr int kTileSums = 4;                   // registers that sums are kept in, side by side
constexpr int kTilePanel = kTileSums * kLanes;
constexpr int kScoreStride = kChunk + kLanes;  // rows 4 KB apart would be taken for one another by the processor

// Registers: sums are 0 to 3. Where a head is no multiple of 16 words, the last step takes narrower ones.
constexpr int kLeft = 4, kLeftTail = 5, kRight = 6, kRightTail = 7;

struct TilePairs : Pairs {
    static constexpr int kWeightStride = kChunk / kPack + kLanes;  // words of a row
    template <int C, int A, int B>
    static OCTAVO_INLINE void multiply_keys() {
        dot_tiles<C, A, B>();
    }
    template <int C, int A, int B>
    static OCTAVO_INLINE void multiply_values() {
        dot_tiles<C, A, B>();
    }
};

struct TileFours : Fours {
    static constexpr int kWeightStride = kChunk / kPack;
    template <int C, int A, int B>
    static OCTAVO_INLINE void multiply_keys() {
        dot_tiles_signed<C, A, B>();
    }
    template <int C, int A, int B>
    static OCTAVO_INLINE void multiply_values() {
        dot_tiles_unsigned_signed<C, A, B>();
    }
};

// Working memory of a thread, of strips in turn.
struct TileScratch {
    static constexpr int64_t kScores = kTileHeight * kScoreStride, kWeights = kTileHeight * TilePairs::kWeightStride,
                             kSums = kTileHeight * kTilePanel;
    static constexpr int64_t kFloats = 2 * kScores + 2 * kWeights + kSums;

    float* memory;
    float* scores(int strip) const { return memory + strip % 2 * kScores; }
    uint32_t* weights(int strip) const {
        return reinterpret_cast<uint32_t*>(memory + 2 * kScores + strip % 2 * kWeights);
    }
    int32_t* sums() const { return reinterpret_cast<int32_t*>(memory + 2 * kScores + 2 * kWeights); }
};

// The rows of a tile in strips of as equal heights as can be. The last may begin before the one before it ends: rows
// of both are computed twice, to the same bits.
struct Strips {
    int num_rows, count, height;

    Strips(int rows, int parts)
        : num_rows(rows),
          count((rows * parts + kTileHeight - 1) / kTileHeight),
          height((rows + count - 1) / count) {}
    int first(int strip) const { return smaller(strip * height, num_rows - height); }
};

// How many registers' worth a count of 16 columns is cut into, as evenly as can be.
struct Panels {
    int first, last, count, width;

    Panels(int begin, int end)
        : first(begin),
          last(end),
          count((end - begin + kTileSums - 1) / kTileSums),
          width((end - begin + count - 1) / count) {}
    int begin(int panel) const { return first + panel * width; }
    int columns(int panel) const { return smaller(width, last - begin(panel)); }
};

// body(Number<0>()) to body(Number<N - 1>()): registers are named by constants.
template <int N, class Body>
OCTAVO_INLINE void for_each_register(const Body& body) {
    if constexpr (N > 0) {
        for_each_register<N - 1>(body);
        body(Number<N - 1>());
    }
}

template <class Body>
OCTAVO_INLINE void with_columns(int columns, const Body& body) {
    switch (columns) {
        case 1: return body(Number<1>());
        case 2: return body(Number<2>());
        case 3: return body(Number<3>());
        default: return body(Number<4>());
    }
}

// ---- keys and values as B

// Of each 16 tokens of a chunk, the first word of their dims; further words are `stride` bytes apart.
struct KeyTiles {
    const char* groups[kChunk / kLanes];
    int64_t stride;
};

// Blocks of 8 tokens are joined two by two: [16 tokens][words][16].
template <class Dot>
void find_keys(const octavo_attention& g, const ChunkRange& range,
               const ChunkBlocks<typename Dot::Element, Dot::kPack>& blocks, int64_t words, float* copies,
               KeyTiles& keys) {
    typedef typename Dot::Element Element;
    const bool whole = g.block_size % kLanes == 0;
    const int64_t stride = int64_t(g.block_size) * 4;
    keys.stride = whole ? stride : kLanes * 4;
    for (int group = range.first / kLanes; group * kLanes < range.last; ++group) {
        if (whole) {
            keys.groups[group] = reinterpret_cast<const char*>(blocks.key_lanes(g, group * kLanes));
            continue;
        }
        const Element *low, *high;
        blocks.key_halves(g, range, group * kLanes, low, high);
        char* const to = reinterpret_cast<char*>(copies + group * kLanes * words);
        for (int64_t word = 0; word < words; ++word) {
            std::memcpy(to + word * 64, reinterpret_cast<const char*>(low) + word * stride, 32);
            std::memcpy(to + word * 64 + 32, reinterpret_cast<const char*>(high) + word * stride, 32);
        }
        keys.groups[group] = to;
    }
}

// Of each 16 words of tokens of a chunk, the first dim; further words are `stride` bytes apart.
template <class Dot>
struct ValueTiles {
    static constexpr int kTokens = kStepWords * Dot::kPack;  // of a step
    const char* steps[kChunk / kTokens];
    int64_t stride;
};

// The elements of the word at `token` that are in reach, as a mask.
template <class Dot>
OCTAVO_INLINE uint32_t reach_of_word(int token, const ChunkRange& range) {
    constexpr int bits = 32 / Dot::kPack;
    uint32_t mask = 0;
    for (int part = 0; part < Dot::kPack; ++part) {
        if (token + part >= range.first && token + part < range.last) mask |= ((1u << bits) - 1) << part * bits;
    }
    return mask;
}

template <class Dot, class F>
void copy_step(const octavo_attention& g, const ChunkRange& range,
               const ChunkBlocks<typename Dot::Element, Dot::kPack>& blocks, int token, float* to, F& fetch) {
    constexpr int P = Dot::kPack;
    const int64_t stride = value_stride(g);
    for (int word = 0; word < kStepWords; ++word, token += P, to += stride) {
        if (word % kTileSums == 0) fetch.step();
        const uint32_t mask = reach_of_word<Dot>(token, range);
        if (mask == 0) {
            std::memset(to, 0, size_t(stride) * 4);
            continue;
        }
        const auto* const from = blocks.values[token / g.block_size] + token % g.block_size / P * stride * P;
        for (int64_t d = 0; d < stride; d += kLanes) {
            const __m512i x = _mm512_loadu_si512(from + d * P);
            _mm512_storeu_si512(to + d, _mm512_and_si512(x, _mm512_set1_epi32(int(mask))));
        }
    }
}

// Steps that lie in one block and within reach are read where they are, others are copied.
template <class Dot, class F>
void find_values(const octavo_attention& g, const ChunkRange& range,
                 const ChunkBlocks<typename Dot::Element, Dot::kPack>& blocks, float* copies, ValueTiles<Dot>& values,
                 F& fetch) {
    constexpr int tokens = ValueTiles<Dot>::kTokens;
    values.stride = value_stride(g) * 4;
    for (int step = range.first / tokens; step * tokens < range.last; ++step) {
        const int token = step * tokens;
        if (g.block_size % tokens == 0 && token >= range.first && token + tokens <= range.last) {
            const auto* const block = reinterpret_cast<const char*>(blocks.values[token / g.block_size]);
            values.steps[step] = block + token % g.block_size / Dot::kPack * values.stride;
        } else {
            float* const to = copies + step * kStepWords * value_stride(g);
            copy_step<Dot>(g, range, blocks, token, to, fetch);
            values.steps[step] = reinterpret_cast<const char*>(to);
        }
    }
}

// ---- products

// s[rows][N * 16) of queries [rows][words] at `q`.
template <class Dot, int N, bool Tail, class F>
void score_columns(const char* q, int64_t words, const KeyTiles& keys, int group, float* s, F& fetch) {
    for_each_register<N>([&](auto n) OCTAVO_LAMBDA { zero_tile<n.value>(); });
    int64_t at = 0;
    for (; at + kStepWords <= words; at += kStepWords) {
        load_tile<kLeft>(q + at * 4, words * 4);
        for_each_register<N>([&](auto n) OCTAVO_LAMBDA {
            constexpr int right = Tail ? kRight : kRight + n.value % 2;
            load_tile<right>(keys.groups[group + n.value] + at * keys.stride, keys.stride);
            Dot::template multiply_keys<n.value, kLeft, right>();
            fetch.step();
        });
    }
    if constexpr (Tail) {
        load_tile<kLeftTail>(q + at * 4, words * 4);
        for_each_register<N>([&](auto n) OCTAVO_LAMBDA {
            load_tile<kRightTail>(keys.groups[group + n.value] + at * keys.stride, keys.stride);
            Dot::template multiply_keys<n.value, kLeftTail, kRightTail>();
            fetch.step();
        });
    }
    for_each_register<N>([&](auto n) OCTAVO_LAMBDA { store_tile<n.value>(s + n.value * kLanes, kScoreStride * 4); });
}

// o[rows][N * 16) of weights at `p`, of steps [begin, end). `offset`: bytes to the first dim.
template <class Dot, int N, bool Tail, class F>
void value_columns_of_tiles(const uint32_t* p, const ValueTiles<Dot>& values, int begin, int end, int64_t offset,
                            void* o, int64_t o_stride, F& fetch) {
    for_each_register<N>([&](auto n) OCTAVO_LAMBDA { zero_tile<n.value>(); });
    for (int step = begin; step < end; ++step) {
        load_tile<kLeft>(p + step * kStepWords, Dot::kWeightStride * 4);
        const char* const v = values.steps[step] + offset;
        for_each_register<N>([&](auto n) OCTAVO_LAMBDA {
            constexpr int right = Tail ? kRight : kRight + n.value % 2;
            load_tile<right>(v + n.value * 64, values.stride);
            Dot::template multiply_values<n.value, kLeft, right>();
            fetch.step();
        });
    }
    for_each_register<N>([&](auto n) OCTAVO_LAMBDA {
        store_tile<n.value>(static_cast<char*>(o) + n.value * 64, o_stride * 4);
    });
}

// ---- one chunk of one tile

// Sizes of the registers for strips of `height` packed rows and heads of so many words.
inline void use_attention_tiles(int height, int64_t words) {
    const int tail = words % kStepWords == 0 ? kStepWords : int(words % kStepWords);
    TileConfig config;
    for (int sum = 0; sum < kTileSums; ++sum) config.set(sum, height);
    config.set(kLeft, height);
    config.set(kLeftTail, height, tail * 4);
    config.set(kRight, kStepWords);
    config.set(kRightTail, tail);
    use_tiles(config);
}

template <class Dot, class F>
struct TileWork {
    typedef ChunkBlocks<typename Dot::Element, Dot::kPack> Blocks;

    const octavo_attention& g;
    const ChunkRange& range;
    const Blocks& blocks;
    const PackedQuery& query;
    const Strips strips;
    const TileScratch scratch;
    float *key_copies, *value_copies;
    const float* weight_scales;  // of each row, int8 alone
    float* out;                  // [rows][stride]
    int64_t stride;
    F& fetch;
    KeyTiles keys = {};
    ValueTiles<Dot> values = {};

    static constexpr int kParts = Dot::kParts;

    // soften(row, end, rows) takes one row or two, below `end`, from scores to weights, and returns how many.
    template <class Soften>
    void run(const Soften& soften) {
        const Panels tokens(range.first / kLanes, (range.last + kLanes - 1) / kLanes), dims(0, int(stride) / kLanes);
        find_keys<Dot>(g, range, blocks, query.lanes, key_copies, keys);
        for (int panel = 0; panel < tokens.count; ++panel) score(0, tokens, panel);
        find_values<Dot>(g, range, blocks, value_copies, values, fetch);  // which have been fetched by now
        for (int strip = 0; strip < strips.count; ++strip) {
            const int weighs = strip > 0 ? dims.count : 0, scores = strip + 1 < strips.count ? tokens.count : 0;
            int done = 0;
            const int first = strips.first(strip);
            for (int i = 0; i < strips.height;) {
                i += soften(first + i, first + strips.height, rows_at(strip, i));
                // As much of the products' work as is due after so many of the rows.
                for (; done * strips.height < (weighs + scores) * i; ++done) {
                    if (done < weighs) {
                        weigh(strip - 1, dims, done);
                    } else {
                        score(strip + 1, tokens, done - weighs);
                    }
                }
            }
        }
        for (int panel = 0; panel < dims.count; ++panel) weigh(strips.count - 1, dims, panel);
    }

private:
    bool tail() const { return query.lanes % kStepWords != 0; }

    void score(int strip, const Panels& tokens, int panel) const {
        const auto* const q = reinterpret_cast<const char*>(query.words + strips.first(strip) * kParts * query.lanes);
        const int group = tokens.begin(panel);
        float* const s = scratch.scores(strip) + group * kLanes;
        with_columns(tokens.columns(panel), [&](auto n) OCTAVO_LAMBDA {
            if (tail()) {
                score_columns<Dot, n.value, true>(q, query.lanes, keys, group, s, fetch);
            } else {
                score_columns<Dot, n.value, false>(q, query.lanes, keys, group, s, fetch);
            }
        });
    }

    // The rows of a strip from i on; whole numbers of the first are made floats, in place.
    SoftRows rows_at(int strip, int i) const {
        float* const s = scratch.scores(strip) + i * kParts * kScoreStride;
        if constexpr (kParts > 1) {
            for (int at = range.first / kLanes * kLanes; at < range.last; at += kLanes) {
                const __m512i high = _mm512_loadu_si512(s + at), low = _mm512_loadu_si512(s + kScoreStride + at);
                _mm512_storeu_ps(s + at, Dot::join(high, low, 128.0f));
            }
        }
        constexpr int W = kParts * Dot::kWeightStride;
        return {s, kScoreStride, scratch.weights(strip) + i * W, W};
    }

    void weigh(int strip, const Panels& dims, int panel) const {
        constexpr int tokens = ValueTiles<Dot>::kTokens;
        const int begin = range.first / tokens, end = (range.last + tokens - 1) / tokens;
        const int d = dims.begin(panel) * kLanes, columns = dims.columns(panel);
        float* const o = out + strips.first(strip) * stride + d;
        void* const to = kParts > 1 ? static_cast<void*>(scratch.sums()) : o;
        const int64_t to_stride = kParts > 1 ? kTilePanel : stride;
        const uint32_t* const p = scratch.weights(strip);
        with_columns(columns, [&](auto n) OCTAVO_LAMBDA {
            if (tail()) {
                value_columns_of_tiles<Dot, n.value, true>(p, values, begin, end, d * 4, to, to_stride, fetch);
            } else {
                value_columns_of_tiles<Dot, n.value, false>(p, values, begin, end, d * 4, to, to_stride, fetch);
            }
        });
        if constexpr (kParts > 1) join_values(strip, o, columns);
    }

    void join_values(int strip, float* o, int columns) const {
        for (int i = 0; i < strips.height; ++i, o += stride) {
            const int32_t* const sums = scratch.sums() + i * kParts * kTilePanel;
            const __m512 scale = _mm512_set1_ps(weight_scales[strips.first(strip) + i]);
            for (int at = 0; at < columns * kLanes; at += kLanes) {
                const __m512i high = _mm512_loadu_si512(sums + at), low = _mm512_loadu_si512(sums + kTilePanel + at);
                _mm512_storeu_ps(o + at, _mm512_mul_ps(Dot::join(high, low, 256.0f), scale));
            }
        }
    }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
