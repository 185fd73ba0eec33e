// Reading the cache: where a chunk's blocks lie, its panels in floats, and fetching what comes next.
#pragma once

#include "layout.h"
#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

struct Int8 {
    int8_t bits;
};

// Where an instruction set has products of pairs and of fours.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define OCTAVO_PACKED_PRODUCTS
#endif

// Element `part` of each lane of the cache, P a lane, as floats.
template <int P>
OCTAVO_INLINE Floats load_part(const float* p, int) {
    return load(p);
}
template <int P>
OCTAVO_INLINE Floats load_part(const Float16* p, int) {
    return load(p);
}
template <int P>
OCTAVO_INLINE Floats load_part(const BFloat16* p, int part) {
    if constexpr (P == 1) return load(p);
    return (Floats)(load_words(p) << (16 - 16 * part) & 0xffff0000u);
}
template <int P>
OCTAVO_INLINE Floats load_part(const Int8* p, int part) {
    return to_floats((Ints)(load_words(p) << (24 - 8 * part)) >> 24);
}

// What a tile's chunks have in common.
struct TileView {
    const octavo_attention& g;
    const Tile& tile;
    int rows;
    int first_position;  // of the tile's first token
    const int32_t* table;

    TileView(const octavo_attention& geometry, const Tile& t)
        : g(geometry),
          tile(t),
          rows(t.num_tokens * t.num_heads),
          first_position(geometry.seq_lens[t.row] -
                         (geometry.query_start_loc[t.row + 1] - geometry.query_start_loc[t.row]) + t.first_token),
          table(geometry.block_table + t.row * geometry.block_table_stride) {}

    int64_t token(int i) const { return int64_t(g.query_start_loc[tile.row]) + tile.first_token + i; }
    int first_head() const { return tile.kv_head * (g.num_heads / g.num_kv_heads) + tile.first_head; }
    int position(int row) const { return first_position + row / tile.num_heads; }
    int last_position() const { return first_position + tile.num_tokens - 1; }
    // The first position that the token at `position` sees.
    int first_seen(int position) const { return g.window > 0 ? larger(0, position + 1 - g.window) : 0; }
};

// The positions of a chunk that a tile's rows see: begin + [first, last).
struct ChunkRange {
    int begin, first, last;

    ChunkRange(const TileView& view, int chunk)
        : begin(chunk * kChunk),
          first(larger(0, view.first_seen(view.first_position) - begin)),
          last(smaller(kChunk, view.last_position() + 1 - begin)) {}
};

// A chunk's blocks as the cache holds them, P elements a lane.
template <class T, int P>
struct ChunkBlocks {
    // Of each block, at this chunk's part of it; null where no row sees any of it.
    const T* keys[kChunk / 8] = {};
    const T* values[kChunk / 8] = {};
    const float* scales[kChunk / 8] = {};  // of keys; those of values are block_size further on

    // Entries of the table before the range may be stale and are not read.
    ChunkBlocks(const Attend& a, const TileView& view, const ChunkRange& range) {
        const octavo_attention& g = view.g;
        const int home = range.begin / g.block_size, end = (range.begin + range.last - 1) / g.block_size + 1;
        for (int b = (range.begin + range.first) / g.block_size; b < end; ++b) {
            const int64_t index = int64_t(view.table[b]) * g.num_kv_heads + view.tile.kv_head;
            const T* key = static_cast<const T*>(a.cache) + index * head_elements(g);
            const T* value = key + key_elements(g);
            const int skipped = larger(0, range.begin - b * g.block_size);  // a block may be several chunks long
            keys[b - home] = key + (g.latent ? skipped * value_stride(g) : skipped * P);
            values[b - home] = value + skipped * value_stride(g);
            if constexpr (sizeof(T) == 1) {
                scales[b - home] = reinterpret_cast<const float*>(value + value_elements(g)) + skipped;
            }
        }
    }

    // The lanes of tokens from `token` on, of the first dims; further dims are block_size * P elements apart.
    const T* key_lanes(const octavo_attention& g, int token) const {
        return keys[token / g.block_size] + token % g.block_size * P;
    }

    // Where a block holds 8 tokens, a vector of 16 spans two, of which one may be out of reach.
    void key_halves(const octavo_attention& g, const ChunkRange& range, int token, const T*& low,
                    const T*& high) const {
        low = token + 8 > range.first ? key_lanes(g, token) : key_lanes(g, token + 8);
        high = token + 8 < range.last ? key_lanes(g, token + 8) : low;
    }

    // panels[d][panel_width], one after another, of the range's tokens, rounded out to vectors.
    template <int Width>
    void unpack_keys(const octavo_attention& g, const ChunkRange& range, float* panels) const {
        const int64_t stride = int64_t(g.block_size) * P;
        for (int t = range.first / kLanes * kLanes; t < range.last; t += kLanes) {
            float* to = panels + t / Width * (int64_t(Width) * g.head_size) + t % Width;
            if (g.block_size % kLanes == 0) {
                const T* from = key_lanes(g, t);
                for (int64_t d = 0; d < g.head_size; ++d) {
                    store(to + d * Width, load_part<P>(from + d / P * stride, int(d % P)));
                }
            } else if constexpr (kLanes > 8) {
                const T *low, *high;
                key_halves(g, range, t, low, high);
                for (int64_t d = 0; d < g.head_size; ++d) {
                    T both[kLanes * P];
                    std::memcpy(both, low + d / P * stride, 8 * P * sizeof(T));
                    std::memcpy(both + 8 * P, high + d / P * stride, 8 * P * sizeof(T));
                    store(to + d * Width, load_part<P>(both, int(d % P)));
                }
            }
        }
    }

    template <int Width>
    void unpack_latent_keys(const octavo_attention& g, const ChunkRange& range, float* panels, float* row) const {
        for (int t = range.first; t < range.last; ++t) {
            const T* from = keys[t / g.block_size] + t % g.block_size * value_stride(g);
            for (int64_t d = 0; d < value_stride(g); d += kLanes) store(row + d, load_part<1>(from + d, 0));
            float* to = panels + t / Width * (int64_t(Width) * g.head_size) + t % Width;
            for (int64_t d = 0; d < g.head_size; ++d) to[d * Width] = row[d];
        }
    }

    // panels[t][panel_width], one after another, of the range's tokens.
    template <int Width>
    void unpack_values(const octavo_attention& g, const ChunkRange& range, int64_t width, float* panels) const {
        const int64_t stride = value_stride(g) * P;
        for (int t = range.first; t < range.last; ++t) {
            const T* from = values[t / g.block_size] + t % g.block_size / P * stride;
            for (int64_t d = 0; d < width; d += kLanes) {
                store(panels + d / Width * (int64_t(Width) * kChunk) + t * Width + d % Width,
                      load_part<P>(from + d * P, t % P));
            }
        }
    }

    // The range's scales of keys, or of values, at to[token].
    void copy_scales(const octavo_attention& g, const ChunkRange& range, bool of_values, float* to) const {
        for (int t = range.first; t < range.last;) {
            const int offset = t % g.block_size, n = smaller(range.last - t, g.block_size - offset);
            const float* from = scales[t / g.block_size] + offset + (of_values ? g.block_size : 0);
            std::memcpy(to + t, from, size_t(n) * sizeof(float));
            t += n;
        }
    }
};

// Brings nearer what is read some steps later, `Lines` cache lines a step: keys of a chunk's blocks, their values, the
// keys of the next chunk, in the order in which they are read.
template <int Lines>
struct Fetch {
    struct Part {
        uintptr_t begin, end;
    };
    Part parts[3 * (kChunk / 8)];
    int num_parts = 0, part = 0;
    // Two parts at a time read faster from memory than one.
    static constexpr int kWays = Lines > 1 ? 2 : 1;
    Part now[kWays] = {};  // where the next lines are

    // Of a chunk that is computed now, or after it. Blocks longer than a chunk are left to the processor.
    void add(const Attend& a, const TileView& view, int chunk, int item_bytes, bool current) {
        const octavo_attention& g = view.g;
        if (g.block_size > kChunk) return;
        const ChunkRange range(view, chunk);
        const int64_t bytes = head_elements(g) * item_bytes, key_bytes = key_elements(g) * item_bytes;
        const int begin = (range.begin + range.first) / g.block_size,
                  end_block = (range.begin + range.last - 1) / g.block_size + 1;
        for (int kind = 0; kind < (current ? 2 : 1); ++kind) {
            for (int b = begin; b < end_block; ++b) {
                const int64_t index = int64_t(view.table[b]) * g.num_kv_heads + view.tile.kv_head;
                const auto head = reinterpret_cast<uintptr_t>(a.cache) + uintptr_t(index * bytes);
                const auto middle = head + uintptr_t(key_bytes);
                parts[num_parts++] = kind ? Part{middle, head + uintptr_t(bytes)} : Part{head, middle};
            }
        }
    }
    // Begins as many parts ahead as a panel of `tokens` has.
    void start(const octavo_attention& g, int tokens) {
        const int ahead = larger(1, tokens / g.block_size);
        part = smaller(ahead, num_parts);
        next();
    }
    void next() {
        for (Part& p : now) p = part < num_parts ? parts[part++] : Part{};
    }

    OCTAVO_INLINE void step() {
        if (now[0].begin == 0) return;
#pragma GCC unroll 8
        for (int i = 0; i < Lines; ++i) {
            __builtin_prefetch(reinterpret_cast<const void*>(now[i % kWays].begin + uintptr_t(i / kWays * 64)));
        }
        for (Part& p : now) p.begin += Lines / kWays * 64;
        if (now[0].begin >= now[0].end) next();
    }
};

}  // namespace OCTAVO_ISA
}  // namespace octavo
