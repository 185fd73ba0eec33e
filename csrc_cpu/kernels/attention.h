// Paged attention: prefill, decode and any mixture in one kernel.
//
// A tile is up to kTileRows query rows (token, head) that share one KV head. The KV is walked in chunks of kChunk
// positions that lie at multiples of kChunk. Within a chunk a row has its own maximum and sums; chunks are folded
// in ascending order. So a row's arithmetic depends on its own position alone: not on the rows of its tile, not on
// how the prompt was cut, not on whether one thread walked the chunks or several did.
//
// Which products compute follows from dtypes and instruction set: on tiles or on packed lanes for an int8 cache and for
// a bfloat16 cache of bfloat16 activations where there are such, in floats for everything else.
//
// Few query rows read the cache as it lies, converting on the way. In floats many rows first unpack a chunk to
// panels. Both feed the same products in the same order, and conversion is exact, so both give the same bits.
#pragma once

#include "cache.h"
#include "packed.h"
#include "products.h"
#include "softmax.h"
#include "tile_attention.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kUnpackRows = 10;  // from so many query rows on unpacking pays

// Where the parts of a thread's scratch begin.
struct Workspace {
    float* query;       // [kTileRows] heads, or packed rows in their place
    float* scores;      // [kTileRows][kChunk]
    float* keys;        // a chunk unpacked; or packed weights in its place
    float* values;      // a chunk unpacked
    TokenScales scales;  // [kChunk] each
    float* query_scales;
    float* weight_scales;
    int32_t* query_start;
    RowSums total, chunk;
#if defined(OCTAVO_TILES)
    TileScratch tiles;
    static constexpr int64_t kTileFloats = TileScratch::kFloats;
#else
    static constexpr int64_t kTileFloats = 0;
#endif

    static int64_t out_stride(const octavo_attention& g) { return round_up(g.value_size, kValueAlign); }
    static int64_t query_floats(const octavo_attention& g) { return round_up(g.head_size, 16); }
    static int64_t key_floats(const octavo_attention& g) {
        return kChunk * larger<int64_t>(g.head_size, kTileRows);  // packed weights: half a float each at most
    }
    static int64_t value_floats(const octavo_attention& g) { return kChunk * round_up(out_stride(g), kPanel); }

    static int64_t size(const octavo_attention& g) {
        return kTileRows * (query_floats(g) + kChunk + 2 * out_stride(g) + 8) + key_floats(g) + value_floats(g) +
               2 * kChunk + kTileFloats;
    }

    Workspace(const octavo_attention& g, float* scratch) {
        const auto take = [&](int64_t floats) {
            float* const part = scratch;
            scratch += floats;
            return part;
        };
#if defined(OCTAVO_TILES)
        tiles.memory = take(kTileFloats);
#endif
        scores = take(kTileRows * kChunk);
        keys = take(key_floats(g));
        values = take(value_floats(g));
        chunk.out = take(kTileRows * out_stride(g));
        total.out = take(kTileRows * out_stride(g));
        query = take(kTileRows * query_floats(g));
        scales.keys = take(kChunk);
        scales.values = take(kChunk);
        query_scales = take(kTileRows);
        weight_scales = take(kTileRows);
        query_start = reinterpret_cast<int32_t*>(take(2 * kTileRows));
        chunk.max = take(kTileRows);
        chunk.sum = take(kTileRows);
        total.max = take(kTileRows);
        total.sum = take(kTileRows);
    }
};

// body(row, head of the query or of the output), in the order of a tile's rows.
template <class T, class Body>
OCTAVO_INLINE void for_each_row(const TileView& view, T* tensor, int64_t token_stride, int64_t head_stride,
                                const Body& body) {
    int row = 0;
    for (int i = 0; i < view.tile.num_tokens; ++i) {
        T* head = tensor + view.token(i) * token_stride + view.first_head() * head_stride;
        for (int h = 0; h < view.tile.num_heads; ++h, head += head_stride) body(row++, head);
    }
}

template <class A, class Body>
OCTAVO_INLINE void for_each_query(const Attend& a, const TileView& view, const Body& body) {
    for_each_row(view, static_cast<const A*>(a.query), a.query_token_stride, a.query_head_stride, body);
}

template <class T>
void load_query(const Attend& a, const TileView& view, const Workspace& w) {
    const int64_t stride = Workspace::query_floats(view.g);
    for_each_query<T>(a, view, [&](int row, const T* x) OCTAVO_LAMBDA {
        float* q = w.query + row * stride;
        for_each_vector(view.g.head_size, [&](int64_t d, auto get, auto put) OCTAVO_LAMBDA { put(q + d, get(x + d)); });
    });
}

template <class T>
void store_out(const Attend& a, const TileView& view, const float* out) {
    const int64_t stride = Workspace::out_stride(view.g);
    for_each_row(view, static_cast<T*>(a.out), a.out_token_stride, a.out_head_stride,
                 [&](int row, T* y) OCTAVO_LAMBDA {
                     const float* o = out + row * stride;
                     for_each_vector(view.g.value_size, [&](int64_t d, auto get, auto put)
                                                            OCTAVO_LAMBDA { put(y + d, get(o + d)); });
                 });
}

// What row sees of a chunk.
OCTAVO_INLINE Seen seen_by(const TileView& view, const ChunkRange& range, int row) {
    const int position = view.position(row);
    return {larger(0, view.first_seen(position) - range.begin), smaller(kChunk, position + 1 - range.begin),
            view.g.scale, view.g.softcap};
}

// ---- one chunk: maxima, sums and weighted values of its own. A row that sees nothing of it has maximum kNone.

// In floats, of a cache of P elements of T a lane.
template <class T, int P>
struct FloatChunk {
    static constexpr int kItemBytes = sizeof(T), kPanelTokens = kPanel;
    static constexpr int kLines = (kPanel * kItemBytes + 63) / 64;  // that a step of the products reads

    static void begin(const Attend& a, const TileView& view, const Workspace& w) {
        switch (view.g.dtype) {
            case OCTAVO_FLOAT32: return load_query<float>(a, view, w);
            case OCTAVO_BFLOAT16: return load_query<BFloat16>(a, view, w);
            default: return load_query<Float16>(a, view, w);
        }
    }

    static void run(const Attend& a, const TileView& view, int chunk, const Workspace& w, Fetch<kLines>& fetch,
                    const RowSums& to) {
        const octavo_attention& g = view.g;
        const ChunkRange range(view, chunk);
        const ChunkBlocks<T, P> blocks(a, view, range);
        TokenScales scales = {nullptr, nullptr};
        if constexpr (sizeof(T) == 1) {
            scales = w.scales;
            blocks.copy_scales(g, range, false, w.scales.keys);
            blocks.copy_scales(g, range, true, w.scales.values);
        }
        const int first_vector = range.first / kLanes, last_vector = (range.last + kLanes - 1) / kLanes;
        score(view, blocks, range, first_vector, last_vector, w, fetch);
        for (int r = 0; r < view.rows; ++r) {
            soften_row(w.scores + r * kChunk, first_vector, last_vector, seen_by(view, range, r), scales, to.max[r],
                       to.sum[r]);
        }
        weigh(view, blocks, range, w, fetch, to.out);
    }

private:
    static void score(const TileView& view, const ChunkBlocks<T, P>& blocks, const ChunkRange& range, int first_vector,
                      int last_vector, const Workspace& w, Fetch<kLines>& fetch) {
        const octavo_attention& g = view.g;
        const int64_t q_stride = Workspace::query_floats(g);
        const bool unpack = view.rows >= kUnpackRows || g.latent || g.block_size % kLanes != 0;
        if (unpack && g.latent) {
            blocks.template unpack_latent_keys<kPanel>(g, range, w.keys, w.scores);
        } else if (unpack) {
            blocks.template unpack_keys<kPanel>(g, range, w.keys);
        }
        for (int panel = first_vector / kVectors; panel * kVectors < last_vector; ++panel) {
            KeyVectors<T> stored = {{}, int64_t(g.block_size) * P};
            KeyVectors<float> unpacked = {{}, kPanel};
            for (int n = 0; n < kVectors; ++n) {
                // Past the end the last vector is computed again; nobody reads it.
                const int v = smaller(larger(panel * kVectors + n, first_vector), last_vector - 1);
                if (unpack) {
                    unpacked.vectors[n] = w.keys + panel * (int64_t(kPanel) * g.head_size) + v % kVectors * kLanes;
                } else {
                    stored.vectors[n] = blocks.key_lanes(g, v * kLanes);
                }
            }
            for (int r = 0; r < view.rows; r += kRows) {
                const int rows = smaller(kRows, view.rows - r);
                const float* q = w.query + r * q_stride;
                float* s = w.scores + r * kChunk + panel * kPanel;
                if (unpack) {
                    score_rows<1>(rows, q, q_stride, g.head_size, unpacked, s, fetch);
                } else {
                    score_rows<P>(rows, q, q_stride, g.head_size, stored, s, fetch);
                }
            }
        }
    }

    static void weigh(const TileView& view, const ChunkBlocks<T, P>& blocks, const ChunkRange& range,
                      const Workspace& w, Fetch<kLines>& fetch, float* out) {
        const octavo_attention& g = view.g;
        const int64_t stride = Workspace::out_stride(g);
        const bool unpack = view.rows >= kUnpackRows;
        if (unpack) blocks.template unpack_values<kPanel>(g, range, stride, w.values);
        for (int64_t d = 0; d < stride; d += kPanel) {
            const int vectors = int(smaller<int64_t>(kVectors, (stride - d) / kLanes));
            const float* panel = w.values + d * kChunk;
            for (int r = 0; r < view.rows; r += kRows) {
                const int rows = smaller(kRows, view.rows - r);
                const float* p = w.scores + r * kChunk;
                float* o = out + r * stride + d;
                if (unpack) {
                    const ValueRows<float> unpacked = {&panel, kChunk, kPanel};
                    value_columns<1>(vectors, rows, p, unpacked, 0, range.first, range.last, o, stride, fetch);
                } else {
                    const ValueRows<T> stored = {blocks.values, g.block_size, value_stride(g) * P};
                    value_columns<P>(vectors, rows, p, stored, d, range.first, range.last, o, stride, fetch);
                }
            }
        }
    }
};

#if defined(OCTAVO_PACKED_PRODUCTS)

// On packed lanes, of activations of dtype A.
template <class Dot, class A>
struct PackedChunk {
    typedef typename Dot::Element Element;
    static constexpr int P = Dot::kPack, kItemBytes = sizeof(Element), kPanelTokens = kPackedPanel;
    static constexpr int kBlockRows = kPackedRows / Dot::kParts;
    // Cache lines that a step of the products reads, and its share of the scales.
    static constexpr int kLines = kPackedVectors + 2 * (kItemBytes == 1);

    static int64_t lanes(const octavo_attention& g) { return (g.head_size + P - 1) / P; }
    static void begin(const Attend& a, const TileView& view, const Workspace& w) {
        auto* words = reinterpret_cast<uint32_t*>(w.query);
        for_each_query<A>(a, view, [&](int row, const A* x) OCTAVO_LAMBDA {
            pack_query(Dot(), x, view.g.head_size, row, words, w.query_start, w.query_scales + row);
        });
    }

    static void run(const Attend& a, const TileView& view, int chunk, const Workspace& w, Fetch<kLines>& fetch,
                    const RowSums& to) {
        const octavo_attention& g = view.g;
        const ChunkRange range(view, chunk);
        const ChunkBlocks<Element, P> blocks(a, view, range);
        TokenScales scales = {nullptr, nullptr};
        if constexpr (Dot::kParts > 1) {
            scales = w.scales;
            blocks.copy_scales(g, range, false, w.scales.keys);
            blocks.copy_scales(g, range, true, w.scales.values);
        }
        if (g.block_size % kLanes == 0) {
            score<false>(view, blocks, range, w, fetch);
        } else {
            score<true>(view, blocks, range, w, fetch);
        }
        auto* words = reinterpret_cast<uint32_t*>(w.keys);
        constexpr int W = kChunk / P * Dot::kParts;  // of a row
        for (int r = 0; r < view.rows;) {
            r += soften(view, range, r, view.rows, {w.scores + r * kChunk, kChunk, words + r * W, W}, scales, w, to);
        }
        weigh(view, blocks, range, {words, w.weight_scales}, fetch, to.out);
    }

protected:
    // Takes row `row` from scores to weights, and the next one too, below `end`, where two go together; returns how
    // many.
    static int soften(const TileView& view, const ChunkRange& range, int row, int end, const SoftRows& rows,
                      const TokenScales& scales, const Workspace& w, const RowSums& to) {
        Seen seen = seen_by(view, range, row);
        if constexpr (Dot::kParts > 1) {
            seen.scale *= w.query_scales[row];
        } else if (row + 1 < end && sees_all(seen) && sees_all(seen_by(view, range, row + 1))) {
            soften_two(Dot(), rows, seen, to.max + row, to.sum + row);
            if (to.max[row] != kNone && to.max[row + 1] != kNone) return 2;
        }
        soften_packed_row(Dot(), rows, range, seen, scales, Dot::kParts > 1 ? w.weight_scales + row : nullptr,
                          to.max[row], to.sum[row]);
        return 1;
    }

private:
    template <bool Halves>
    static void score(const TileView& view, const ChunkBlocks<Element, P>& blocks, const ChunkRange& range,
                      const Workspace& w, Fetch<kLines>& fetch) {
        const octavo_attention& g = view.g;
        const int first_vector = range.first / kLanes, last_vector = (range.last + kLanes - 1) / kLanes;
        const PackedQuery q = {reinterpret_cast<const uint32_t*>(w.query), w.query_start, lanes(g)};
        for (int panel = first_vector / kPackedVectors; panel * kPackedVectors < last_vector; ++panel) {
            KeyLanes keys = {{}, {}, int64_t(g.block_size) * 4};
            for (int n = 0; n < kPackedVectors; ++n) {
                // Past the end the last vector is computed again; nobody reads it.
                const int v = smaller(larger(panel * kPackedVectors + n, first_vector), last_vector - 1);
                const Element *low, *high = nullptr;
                if constexpr (Halves) {
                    blocks.key_halves(g, range, v * kLanes, low, high);
                } else {
                    low = blocks.key_lanes(g, v * kLanes);
                }
                keys.low[n] = reinterpret_cast<const char*>(low);
                keys.high[n] = reinterpret_cast<const char*>(high);
            }
            for (int r = 0; r < view.rows; r += kBlockRows) {
                const int rows = smaller(kBlockRows, view.rows - r) * Dot::kParts;
                float* s = w.scores + r * kChunk + panel * kPackedPanel;
                packed_scores<Dot, Halves>(rows, q, r * Dot::kParts, keys, s, fetch);
            }
        }
    }

    static void weigh(const TileView& view, const ChunkBlocks<Element, P>& blocks, const ChunkRange& range,
                      const PackedWeights& p, Fetch<kLines>& fetch, float* out) {
        const octavo_attention& g = view.g;
        const int64_t stride = Workspace::out_stride(g);
        for (int64_t d = 0; d < stride; d += kPackedPanel) {
            const int vectors = int(smaller<int64_t>(kPackedVectors, (stride - d) / kLanes));
            for (int r = 0; r < view.rows; r += kBlockRows) {
                const int rows = smaller(kBlockRows, view.rows - r) * Dot::kParts, row = r * Dot::kParts;
                float* o = out + r * stride + d;
                const auto columns = [&](auto n) OCTAVO_LAMBDA {
                    packed_values<Dot, n.value>(rows, p, row, g, blocks.values, d * 4, range, o, stride, fetch);
                };
                switch (vectors) {
                    case 1: columns(Number<1>()); break;
                    case 2: columns(Number<2>()); break;
                    case 3: columns(Number<3>()); break;
                    default: columns(Number<4>());
                }
            }
        }
    }
};

#endif

#if defined(OCTAVO_TILES)

// The same on tiles.
template <class Dot, class A>
struct TileChunk : PackedChunk<Dot, A> {
    typedef typename Dot::Element Element;
    static constexpr int P = Dot::kPack, kPanelTokens = kTilePanel, kLines = kTileHeight;
    typedef Fetch<kLines> Next;

    static Strips strips(const TileView& view) { return Strips(view.rows, Dot::kParts); }
    static void begin(const Attend& a, const TileView& view, const Workspace& w) {
        PackedChunk<Dot, A>::begin(a, view, w);
        use_attention_tiles(strips(view).height * Dot::kParts, PackedChunk<Dot, A>::lanes(view.g));
    }

    static void run(const Attend& a, const TileView& view, int chunk, const Workspace& w, Next& fetch,
                    const RowSums& to) {
        const octavo_attention& g = view.g;
        const ChunkRange range(view, chunk);
        const ChunkBlocks<Element, P> blocks(a, view, range);
        TokenScales scales = {nullptr, nullptr};
        if constexpr (Dot::kParts > 1) {
            scales = w.scales;
            blocks.copy_scales(g, range, false, w.scales.keys);
            blocks.copy_scales(g, range, true, w.scales.values);
        }
        const PackedQuery query = {reinterpret_cast<const uint32_t*>(w.query), nullptr, PackedChunk<Dot, A>::lanes(g)};
        TileWork<Dot, Next> work = {g,        range,          blocks, query,  strips(view), w.tiles, w.keys,
                                    w.values, w.weight_scales, to.out, Workspace::out_stride(g), fetch};
        work.run([&](int row, int end, const SoftRows& rows) OCTAVO_LAMBDA {
            return PackedChunk<Dot, A>::soften(view, range, row, end, rows, scales, w, to);
        });
    }
};

#endif

// body(the chunk's kind) by dtypes.
template <class Body>
OCTAVO_INLINE void with_chunks(const octavo_attention& g, const Body& body) {
    switch (g.kv_dtype) {
        case OCTAVO_FLOAT32: return body(FloatChunk<float, 1>());
        case OCTAVO_FLOAT16: return body(FloatChunk<Float16, 1>());
        case OCTAVO_BFLOAT16:
            if (g.latent) return body(FloatChunk<BFloat16, 1>());
#if defined(OCTAVO_TILES)
            if (g.dtype == OCTAVO_BFLOAT16) return body(TileChunk<TilePairs, BFloat16>());
#elif defined(OCTAVO_PACKED_PRODUCTS)
            if (g.dtype == OCTAVO_BFLOAT16) return body(PackedChunk<Pairs, BFloat16>());
#endif
            return body(FloatChunk<BFloat16, 2>());
        default:
#if defined(OCTAVO_TILES)
            if (g.dtype == OCTAVO_BFLOAT16) return body(TileChunk<TileFours, BFloat16>());
            if (g.dtype == OCTAVO_FLOAT32) return body(TileChunk<TileFours, float>());
            return body(TileChunk<TileFours, Float16>());
#elif defined(OCTAVO_PACKED_PRODUCTS)
            if (g.dtype == OCTAVO_BFLOAT16) return body(PackedChunk<Fours, BFloat16>());
            if (g.dtype == OCTAVO_FLOAT32) return body(PackedChunk<Fours, float>());
            return body(PackedChunk<Fours, Float16>());
#else
            return body(FloatChunk<Int8, 4>());
#endif
    }
}

// ---- tiles

// Divides by the sums, with the sink's share among them, and stores in the output's dtype.
inline void finish_tile(const Attend& a, const TileView& view, const RowSums& total) {
    const int64_t stride = Workspace::out_stride(view.g);
    for (int r = 0; r < view.rows; ++r) {
        float keep = 1.0f, sum = total.sum[r];
        if (a.sinks) {
            const float sink = a.sinks[view.first_head() + r % view.tile.num_heads] * kLog2E;
            const float top = larger(total.max[r], sink);
            keep = exp2(total.max[r] - top);
            sum = sum * keep + exp2(sink - top);
        }
        const float share = keep / sum;
        float* o = total.out + r * stride;
        for (int64_t d = 0; d < stride; d += kLanes) store(o + d, load(o + d) * share);
    }
    switch (view.g.dtype) {
        case OCTAVO_FLOAT32: return store_out<float>(a, view, total.out);
        case OCTAVO_BFLOAT16: return store_out<BFloat16>(a, view, total.out);
        default: return store_out<Float16>(a, view, total.out);
    }
}

inline void attend_tiles(const Attend& a, float* scratch, int64_t begin, int64_t end) {
    const Workspace w(*a.geometry, scratch);
    const int64_t stride = Workspace::out_stride(*a.geometry);
    with_chunks(*a.geometry, [&](auto chunks) {
        typedef decltype(chunks) Chunk;
        for (int64_t i = begin; i < end; ++i) {
            const TileView view(*a.geometry, a.tiles[i]);
            Chunk::begin(a, view, w);
            clear_rows(view.rows, stride, w.total);
            for (int c = 0; c < view.tile.num_chunks; ++c) {
                const int chunk = view.tile.first_chunk + c;
                Fetch<Chunk::kLines> fetch;
                fetch.add(a, view, chunk, Chunk::kItemBytes, true);
                if (c + 1 < view.tile.num_chunks) {
                    fetch.add(a, view, chunk + 1, Chunk::kItemBytes, false);
                } else if (i + 1 < end) {
                    const TileView next(*a.geometry, a.tiles[i + 1]);
                    fetch.add(a, next, next.tile.first_chunk, Chunk::kItemBytes, false);
                }
                fetch.start(*a.geometry, Chunk::kPanelTokens);
                Chunk::run(a, view, chunk, w, fetch, w.chunk);
                fold_rows(view.rows, stride, w.total, w.chunk);
            }
            finish_tile(a, view, w.total);
        }
    });
}

// Where a piece's sums lie: [rows][stride], maxima, sums.
OCTAVO_INLINE RowSums sums_of(const Attend& a, const Piece& piece, int rows, int64_t stride) {
    float* const out = a.partials + piece.offset;
    return {out + rows * stride, out + rows * (stride + 1), out};
}

inline void attend_pieces(const Attend& a, float* scratch, int64_t begin, int64_t end) {
    const Workspace w(*a.geometry, scratch);
    with_chunks(*a.geometry, [&](auto chunks) {
        typedef decltype(chunks) Chunk;
        for (int64_t i = begin; i < end; ++i) {
            const Piece& piece = a.pieces[i];
            const TileView view(*a.geometry, a.tiles[piece.tile]);
            if (i == begin || a.pieces[i - 1].tile != piece.tile) Chunk::begin(a, view, w);
            Fetch<Chunk::kLines> fetch;
            fetch.add(a, view, piece.chunk, Chunk::kItemBytes, true);
            if (i + 1 < end) {
                const TileView next(*a.geometry, a.tiles[a.pieces[i + 1].tile]);
                fetch.add(a, next, a.pieces[i + 1].chunk, Chunk::kItemBytes, false);
            }
            fetch.start(*a.geometry, Chunk::kPanelTokens);
            Chunk::run(a, view, piece.chunk, w, fetch, sums_of(a, piece, view.rows, Workspace::out_stride(view.g)));
        }
    });
}

inline void fold_tiles(const Attend& a, float* scratch, int64_t begin, int64_t end) {
    const Workspace w(*a.geometry, scratch);
    const int64_t stride = Workspace::out_stride(*a.geometry);
    for (int64_t i = begin; i < end; ++i) {
        const TileView view(*a.geometry, a.tiles[i]);
        clear_rows(view.rows, stride, w.total);
        for (int c = 0; c < view.tile.num_chunks; ++c) {
            fold_rows(view.rows, stride, w.total, sums_of(a, a.pieces[a.first_pieces[i] + c], view.rows, stride));
        }
        finish_tile(a, view, w.total);
    }
}

inline int64_t attend_scratch(const octavo_attention& g) { return Workspace::size(g); }

}  // namespace OCTAVO_ISA
}  // namespace octavo
