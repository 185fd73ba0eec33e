// Paged attention: prefill, decode and any mixture in one kernel, and the writes to the cache.
//
// A tile is up to kTileRows query rows (token, head) that share one KV head. The KV is walked in chunks of kChunk
// positions that lie at multiples of kChunk. Within a chunk a row has its own maximum and sums; chunks are folded
// in ascending order. So a row's arithmetic depends on its own position alone: not on the rows of its tile, not on
// how the prompt was cut, not on whether one thread walked the chunks or several did.
//
// Few query rows read the cache as it lies, converting on the way. Many first unpack a chunk to float panels. Both
// feed the same products in the same order, and conversion is exact, so both give the same bits.
#pragma once

#include "numeric.h"
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
constexpr int kUnpackRows = 10;  // from so many query rows on unpacking pays
constexpr float kNone = -__builtin_inff();

static_assert(kChunk % kPanel == 0, "a chunk is whole panels");

OCTAVO_INLINE int64_t value_stride(const octavo_attention& g) {
    return round_up(g.latent ? g.head_size : g.value_size, kValueAlign);
}
OCTAVO_INLINE int64_t key_elements(const octavo_attention& g) {
    return g.latent ? 0 : int64_t(g.head_size) * g.block_size;
}
OCTAVO_INLINE int64_t head_elements(const octavo_attention& g) {
    return key_elements(g) + value_stride(g) * g.block_size;
}

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

// Where the parts of a thread's scratch begin, in floats.
struct Workspace {
    float *query, *scores, *keys, *values, *chunk_out, *out, *chunk_max, *chunk_sum, *max, *sum;

    static int64_t size(const octavo_attention& g) {
        const int64_t out_stride = round_up(g.value_size, kValueAlign);
        return kTileRows * (round_up(g.head_size, kLanes) + kChunk + 2 * out_stride + 4) +
               kChunk * (int64_t(g.head_size) + round_up(out_stride, kPanel)) + 2 * kLanes;
    }

    Workspace(const octavo_attention& g, float* scratch) {
        const int64_t out_stride = round_up(g.value_size, kValueAlign);
        scores = scratch;
        keys = scores + kTileRows * kChunk;
        values = keys + kChunk * int64_t(g.head_size);
        chunk_out = values + kChunk * round_up(out_stride, kPanel);
        out = chunk_out + kTileRows * out_stride;
        query = out + kTileRows * out_stride;
        chunk_max = query + kTileRows * round_up(g.head_size, kLanes);
        chunk_sum = chunk_max + kTileRows;
        max = chunk_sum + kTileRows;
        sum = max + kTileRows;
    }
};

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

template <class T>
void load_query(const Attend& a, const TileView& view, float* q) {
    const int64_t size = view.g.head_size, stride = round_up(size, kLanes);
    for (int i = 0; i < view.tile.num_tokens; ++i) {
        const T* x = static_cast<const T*>(a.query) + view.token(i) * a.query_token_stride +
                     (int64_t(view.tile.kv_head) * (view.g.num_heads / view.g.num_kv_heads) + view.tile.first_head) *
                         a.query_head_stride;
        for (int h = 0; h < view.tile.num_heads; ++h, x += a.query_head_stride, q += stride) {
            for_each_vector(size, [&](int64_t d, auto get, auto put) OCTAVO_LAMBDA { put(q + d, get(x + d)); });
        }
    }
}

template <class T>
void store_out(const Attend& a, const TileView& view, const float* o, int64_t o_stride) {
    for (int i = 0; i < view.tile.num_tokens; ++i) {
        T* y = static_cast<T*>(a.out) + view.token(i) * a.out_token_stride +
               (int64_t(view.tile.kv_head) * (view.g.num_heads / view.g.num_kv_heads) + view.tile.first_head) *
                   a.out_head_stride;
        for (int h = 0; h < view.tile.num_heads; ++h, y += a.out_head_stride, o += o_stride) {
            for_each_vector(view.g.value_size,
                            [&](int64_t d, auto get, auto put) OCTAVO_LAMBDA { put(y + d, get(o + d)); });
        }
    }
}

// Scores to weights of one row, in place, over vectors [first_vector, last_vector) of the chunk. Positions outside
// [low, high) get weight 0 exactly.
OCTAVO_INLINE void soften_row(float* s, int first_vector, int last_vector, int low, int high, float scale,
                              float softcap, float& row_max, float& row_sum) {
    row_max = kNone;
    row_sum = 0.0f;
    if (low < high) {
        Ints position = splat(int32_t(first_vector * kLanes));
        for (int i = 0; i < kLanes; ++i) position[i] += i;
        Floats top = splat(kNone);
        for (int v = first_vector; v < last_vector; ++v, position += kLanes) {
            Floats x = load(s + v * kLanes) * scale;
            if (softcap > 0.0f) x = tanh(x * (1.0f / softcap)) * softcap;
            x = position < low ? splat(kNone) : x;
            x = position >= high ? splat(kNone) : x;
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
    for (int v = first_vector; v < last_vector; ++v) {
        const Floats p = exp(load(s + v * kLanes) - row_max);
        store(s + v * kLanes, p);
        total += p;
    }
    row_sum = sum(total);
}

// A chunk's blocks as the cache holds them, and their unpacked forms.
template <class T>
struct ChunkBlocks {
    // Keys of the chunk, its values, and keys of the next: the order in which they are read.
    const T* regions[3 * (kChunk / 8)] = {};
    int num_blocks;
    const T* const* keys = regions;
    const T* const* values;

    // Of positions [begin + first, begin + last) of the tile's `end`; entries of the table before them may be
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

// The sums of one chunk: chunk_max, chunk_sum and out [rows][out_stride]. A row that sees nothing of the chunk has
// maximum kNone.
template <class T>
void attend_chunk(const Attend& a, const TileView& view, int chunk, const Workspace& w, float* out, float* chunk_max,
                  float* chunk_sum) {
    const octavo_attention& g = view.g;
    const int64_t q_stride = round_up(g.head_size, kLanes), out_stride = round_up(g.value_size, kValueAlign);
    const int begin = chunk * kChunk;
    const int last = smaller(kChunk, view.last_position() + 1 - begin);
    const int first = larger(0, view.first_seen(view.first_position) - begin);
    const int first_vector = first / kLanes, last_vector = (last + kLanes - 1) / kLanes;
    const ChunkBlocks<T> blocks(a, view, begin, first, last);

    const bool unpack = view.rows >= kUnpackRows || g.latent || g.block_size % kLanes != 0;
    if (unpack) {
        if (g.latent) {
            blocks.unpack_latent_keys(g, first, last, w.keys, w.scores);
        } else {
            blocks.unpack_keys(g, first, last, w.keys);
        }
    }
    for (int panel = first_vector / kVectors; panel * kVectors < last_vector; ++panel) {
        KeyVectors<T> stored = {{}, {}, g.block_size};
        KeyVectors<float> unpacked = {{}, {}, kPanel};
        for (int n = 0; n < kVectors; ++n) {
            // Past the end the last vector is computed again; nobody reads it.
            const int v = smaller(larger(panel * kVectors + n, first_vector), last_vector - 1);
            if (unpack) {
                unpacked.vectors[n] = w.keys + panel * (int64_t(kPanel) * g.head_size) + v % kVectors * kLanes;
            } else {
                stored.vectors[n] = blocks.key_vector(g, v * kLanes);
                const T* ahead = blocks.keys[v * kLanes / g.block_size + blocks.ahead(g)];
                stored.ahead[n] = ahead ? ahead + v * kLanes % g.block_size : stored.vectors[n];
            }
        }
        for (int r = 0; r < view.rows; r += kRows) {
            const int rows = smaller(kRows, view.rows - r);
            const float* q = w.query + r * q_stride;
            float* s = w.scores + r * kChunk + panel * kPanel;
            if (unpack) {
                score_rows<false>(rows, q, q_stride, g.head_size, unpacked, s);
            } else {
                score_rows<true>(rows, q, q_stride, g.head_size, stored, s);
            }
        }
    }

    for (int r = 0; r < view.rows; ++r) {
        const int position = view.first_position + r / view.tile.num_heads;
        soften_row(w.scores + r * kChunk, first_vector, last_vector,
                   larger(0, view.first_seen(position) - begin), smaller(kChunk, position + 1 - begin), g.scale,
                   g.softcap, chunk_max[r], chunk_sum[r]);
    }

    const bool unpack_values = view.rows >= kUnpackRows;
    if (unpack_values) blocks.unpack_values(g, first, last, out_stride, w.values);
    for (int64_t d = 0; d < out_stride; d += kPanel) {
        const int vectors = int(smaller<int64_t>(kVectors, (out_stride - d) / kLanes));
        const float* panel = w.values + d * kChunk;
        for (int r = 0; r < view.rows; r += kRows) {
            const int rows = smaller(kRows, view.rows - r);
            const float* p = w.scores + r * kChunk;
            float* o = out + r * out_stride + d;
            if (unpack_values) {
                const ValueRows<float> unpacked = {&panel, kChunk, kPanel, 0};
                value_columns<false>(vectors, rows, p, unpacked, 0, first, last, o, out_stride);
            } else {
                const ValueRows<T> stored = {blocks.values, g.block_size, value_stride(g), blocks.ahead(g)};
                value_columns<true>(vectors, rows, p, stored, d, first, last, o, out_stride);
            }
        }
    }
}

// Folds a chunk's sums into the running ones. The first chunk that a row sees becomes its state.
OCTAVO_INLINE void fold_rows(int rows, int64_t stride, float* max, float* sum, float* out, const float* chunk_max,
                             const float* chunk_sum, const float* chunk_out) {
    for (int r = 0; r < rows; ++r, out += stride, chunk_out += stride) {
        if (chunk_max[r] == kNone) continue;
        if (max[r] == kNone) {
            max[r] = chunk_max[r];
            sum[r] = chunk_sum[r];
            for (int64_t d = 0; d < stride; d += kLanes) store(out + d, load(chunk_out + d));
            continue;
        }
        const float top = larger(max[r], chunk_max[r]);
        const float keep = exp(max[r] - top), add = exp(chunk_max[r] - top);
        max[r] = top;
        sum[r] = sum[r] * keep + chunk_sum[r] * add;
        for (int64_t d = 0; d < stride; d += kLanes) {
            store(out + d, fma(load(chunk_out + d), splat(add), load(out + d) * keep));
        }
    }
}

OCTAVO_INLINE void clear_rows(int rows, int64_t stride, float* max, float* sum, float* out) {
    for (int r = 0; r < rows; ++r) {
        max[r] = kNone;
        sum[r] = 0.0f;
        for (int64_t d = 0; d < stride; d += kLanes) store(out + r * stride + d, splat(0.0f));
    }
}

// Divides by the sums, with the sink's share among them, and stores in the output's dtype.
inline void finish_tile(const Attend& a, const TileView& view, const Workspace& w) {
    const int64_t stride = round_up(view.g.value_size, kValueAlign);
    const int first_head = view.tile.kv_head * (view.g.num_heads / view.g.num_kv_heads) + view.tile.first_head;
    for (int r = 0; r < view.rows; ++r) {
        float keep = 1.0f, total = w.sum[r];
        if (a.sinks) {
            const float sink = a.sinks[first_head + r % view.tile.num_heads];
            const float top = larger(w.max[r], sink);
            keep = exp(w.max[r] - top);
            total = total * keep + exp(sink - top);
        }
        const float share = keep / total;
        float* o = w.out + r * stride;
        for (int64_t d = 0; d < stride; d += kLanes) store(o + d, load(o + d) * share);
    }
    switch (view.g.dtype) {
        case OCTAVO_FLOAT32: return store_out<float>(a, view, w.out, stride);
        case OCTAVO_BFLOAT16: return store_out<BFloat16>(a, view, w.out, stride);
        default: return store_out<Float16>(a, view, w.out, stride);
    }
}

inline void begin_tile(const Attend& a, const TileView& view, const Workspace& w) {
    switch (view.g.dtype) {
        case OCTAVO_FLOAT32: return load_query<float>(a, view, w.query);
        case OCTAVO_BFLOAT16: return load_query<BFloat16>(a, view, w.query);
        default: return load_query<Float16>(a, view, w.query);
    }
}

inline void attend_any_chunk(const Attend& a, const TileView& view, int chunk, const Workspace& w, float* out,
                             float* chunk_max, float* chunk_sum) {
    switch (view.g.kv_dtype) {
        case OCTAVO_FLOAT32: return attend_chunk<float>(a, view, chunk, w, out, chunk_max, chunk_sum);
        case OCTAVO_BFLOAT16: return attend_chunk<BFloat16>(a, view, chunk, w, out, chunk_max, chunk_sum);
        default: return attend_chunk<Float16>(a, view, chunk, w, out, chunk_max, chunk_sum);
    }
}

inline void attend_tiles(const Attend& a, float* scratch, int64_t begin, int64_t end) {
    const Workspace w(*a.geometry, scratch);
    const int64_t stride = round_up(a.geometry->value_size, kValueAlign);
    for (int64_t i = begin; i < end; ++i) {
        const TileView view(*a.geometry, a.tiles[i]);
        begin_tile(a, view, w);
        clear_rows(view.rows, stride, w.max, w.sum, w.out);
        for (int c = 0; c < view.tile.num_chunks; ++c) {
            attend_any_chunk(a, view, view.tile.first_chunk + c, w, w.chunk_out, w.chunk_max, w.chunk_sum);
            fold_rows(view.rows, stride, w.max, w.sum, w.out, w.chunk_max, w.chunk_sum, w.chunk_out);
        }
        finish_tile(a, view, w);
    }
}

inline void attend_pieces(const Attend& a, float* scratch, int64_t begin, int64_t end) {
    const Workspace w(*a.geometry, scratch);
    const int64_t stride = round_up(a.geometry->value_size, kValueAlign);
    for (int64_t i = begin; i < end; ++i) {
        const Piece& piece = a.pieces[i];
        const TileView view(*a.geometry, a.tiles[piece.tile]);
        begin_tile(a, view, w);
        float* out = a.partials + piece.offset;
        float* chunk_max = out + view.rows * stride;
        attend_any_chunk(a, view, piece.chunk, w, out, chunk_max, chunk_max + view.rows);
    }
}

inline void fold_tiles(const Attend& a, float* scratch, int64_t begin, int64_t end) {
    const Workspace w(*a.geometry, scratch);
    const int64_t stride = round_up(a.geometry->value_size, kValueAlign);
    for (int64_t i = begin; i < end; ++i) {
        const TileView view(*a.geometry, a.tiles[i]);
        clear_rows(view.rows, stride, w.max, w.sum, w.out);
        for (int c = 0; c < view.tile.num_chunks; ++c) {
            const float* out = a.partials + a.pieces[a.first_pieces[i] + c].offset;
            const float* chunk_max = out + view.rows * stride;
            fold_rows(view.rows, stride, w.max, w.sum, w.out, chunk_max, chunk_max + view.rows, out);
        }
        finish_tile(a, view, w);
    }
}

inline int64_t attend_scratch(const octavo_attention& g) { return Workspace::size(g); }

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
