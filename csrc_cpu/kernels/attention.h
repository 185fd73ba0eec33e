// Paged attention: prefill, decode and any mixture in one kernel.
//
// A tile is up to kTileRows query rows (token, head) that share one KV head. The KV is walked in chunks of kChunk
// positions that lie at multiples of kChunk. Within a chunk a row has its own maximum and sums; chunks are folded
// in ascending order. So a row's arithmetic depends on its own position alone: not on the rows of its tile, not on
// how the prompt was cut, not on whether one thread walked the chunks or several did.
//
// Few query rows read the cache as it lies, converting on the way. Many first unpack a chunk to float panels. Both
// feed the same products in the same order, and conversion is exact, so both give the same bits.
#pragma once

#include "cache.h"
#include "numeric.h"
#include "products.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kUnpackRows = 10;  // from so many query rows on unpacking pays
constexpr float kNone = -__builtin_inff();

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
        soften_row(w.scores + r * kChunk, first_vector, last_vector, larger(0, view.first_seen(position) - begin),
                   smaller(kChunk, position + 1 - begin), g.scale, g.softcap, chunk_max[r], chunk_sum[r]);
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

}  // namespace OCTAVO_ISA
}  // namespace octavo
