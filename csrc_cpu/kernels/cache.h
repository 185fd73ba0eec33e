// The cache's blocks: where they lie, how a chunk is unpacked from them, and how tokens are written.
#pragma once

#include "products.h"
#include "simd.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE int64_t value_stride(const octavo_attention& g) {
    return round_up(g.latent ? g.head_size : g.value_size, kValueAlign);
}
OCTAVO_INLINE int64_t key_elements(const octavo_attention& g) {
    return g.latent ? 0 : int64_t(g.head_size) * g.block_size;
}
OCTAVO_INLINE int64_t head_elements(const octavo_attention& g) {
    return key_elements(g) + value_stride(g) * g.block_size;
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
    int last_position() const { return first_position + tile.num_tokens - 1; }
    // The first position that the token at `position` sees.
    int first_seen(int position) const { return g.window > 0 ? larger(0, position + 1 - g.window) : 0; }
};

// A chunk's blocks as the cache holds them, and their unpacked forms.
template <class T>
struct ChunkBlocks {
    // Keys of the chunk, its values, and keys of the next: the order in which they are read.
    const T* regions[3 * (kChunk / 8)] = {};
    int num_blocks;
    const T* const* keys = regions;
    const T* const* values;

    // Of positions [begin + first, begin + last); entries of the table before them may be
    // stale and are not read.
    ChunkBlocks(const Attend& a, const TileView& view, int begin, int first, int last) {
        const octavo_attention& g = view.g;
        const int home = begin / g.block_size, end = (begin + last - 1) / g.block_size + 1;
        num_blocks = end - home;
        values = regions + num_blocks;
        const auto block = [&](int b) {
            const int64_t index = int64_t(view.table[b]) * g.num_kv_heads + view.tile.kv_head;
            return static_cast<const T*>(a.cache) + index * head_elements(g);
        };
        for (int b = (begin + first) / g.block_size; b < end; ++b) {
            const T* key = block(b);
            const T* value = key + key_elements(g);
            // A block may be several chunks long: point at this chunk's part of it.
            const int skipped = larger(0, begin - b * g.block_size);
            regions[b - home] = key + (g.latent ? skipped * value_stride(g) : skipped);
            regions[num_blocks + b - home] = value + skipped * value_stride(g);
        }
        const int last_block = view.last_position() / g.block_size;
        for (int b = end; b <= smaller(last_block, end + ahead(g) - 1); ++b) {
            regions[2 * num_blocks + b - end] = block(b);
        }
    }

    // Blocks between what is read and what is fetched for later.
    static int ahead(const octavo_attention& g) { return larger(1, kPanel / g.block_size); }

    // keys[d * stride ..] of kLanes tokens from `token` on, where blocks hold whole vectors.
    const T* key_vector(const octavo_attention& g, int token) const {
        return keys[token / g.block_size] + token % g.block_size;
    }

    // panels[d][kPanel], one after another, of tokens [first, last) rounded out to vectors.
    void unpack_keys(const octavo_attention& g, int first, int last, float* panels) const {
        for (int t = first / kLanes * kLanes; t < last; t += kLanes) {
            float* to = panels + t / kPanel * (int64_t(kPanel) * g.head_size) + t % kPanel;
            if (g.block_size % kLanes == 0) {
                const T* from = key_vector(g, t);
                for (int64_t d = 0; d < g.head_size; ++d) store(to + d * kPanel, load(from + d * g.block_size));
            } else if constexpr (kLanes > 8) {  // a vector spans two blocks of 8, of which one may be out of reach
                const T* low = t + 8 > first ? key_vector(g, t) : key_vector(g, t + 8);
                const T* high = t + 8 < last ? key_vector(g, t + 8) : low;
                for (int64_t d = 0; d < g.head_size; ++d, low += g.block_size, high += g.block_size) {
                    T both[kLanes];
                    std::memcpy(both, low, 8 * sizeof(T));
                    std::memcpy(both + 8, high, 8 * sizeof(T));
                    store(to + d * kPanel, load(both));
                }
            }
        }
    }

    void unpack_latent_keys(const octavo_attention& g, int first, int last, float* panels, float* row) const {
        for (int t = first; t < last; ++t) {
            const T* from = keys[t / g.block_size] + t % g.block_size * value_stride(g);
            for (int64_t d = 0; d < value_stride(g); d += kLanes) store(row + d, load(from + d));
            float* to = panels + t / kPanel * (int64_t(kPanel) * g.head_size) + t % kPanel;
            for (int64_t d = 0; d < g.head_size; ++d) to[d * kPanel] = row[d];
        }
    }

    // panels[t][kPanel], one after another, of tokens [first, last).
    void unpack_values(const octavo_attention& g, int first, int last, int64_t width, float* panels) const {
        for (int t = first; t < last; ++t) {
            const T* from = values[t / g.block_size] + t % g.block_size * value_stride(g);
            for (int64_t d = 0; d < width; d += kLanes) {
                store(panels + d / kPanel * (int64_t(kPanel) * kChunk) + t * kPanel + d % kPanel, load(from + d));
            }
        }
    }
};

// Activation of dtype A to cache of dtype T.
template <class A, class T>
void write_tokens(const WriteKv& a, int64_t begin, int64_t end) {
    const octavo_attention& g = *a.geometry;
    const int64_t stride = value_stride(g);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = g.slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / g.block_size, offset = slot % g.block_size;
        T* head = static_cast<T*>(a.cache) + block * g.num_kv_heads * head_elements(g);
        const A* key = static_cast<const A*>(a.key) + token * a.key_token_stride;
        const A* value = static_cast<const A*>(a.value) + token * a.value_token_stride;
        for (int h = 0; h < g.num_kv_heads; ++h, head += head_elements(g), key += a.key_head_stride) {
            if (g.latent) {
                T* row = head + offset * stride;
                for_each_vector(g.head_size,
                                [&](int64_t d, auto get, auto put) OCTAVO_LAMBDA { put(row + d, get(key + d)); });
                continue;
            }
            T* column = head + offset;
            for (int64_t d = 0; d < g.head_size; d += kLanes) {
                const int64_t n = smaller<int64_t>(kLanes, g.head_size - d);
                T lanes[kLanes];
                store(lanes, n == kLanes ? load(key + d) : load_first(key + d, n));
                for (int64_t i = 0; i < n; ++i) column[(d + i) * g.block_size] = lanes[i];
            }
            T* row = head + key_elements(g) + offset * stride;
            for_each_vector(g.value_size,
                            [&](int64_t d, auto get, auto put) OCTAVO_LAMBDA { put(row + d, get(value + d)); });
            value += a.value_head_stride;
        }
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
