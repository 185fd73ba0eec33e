#include "attend.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "isa.h"
#include "kernels/layout.h"
#include "pool.h"

namespace octavo {
namespace {

// Below so many elements (or multiply-adds) of work a second thread is not worth waking.
constexpr int64_t kGrainElements = 32 * 1024;
constexpr int64_t kGrainProducts = 256 * 1024;
constexpr int64_t kRangesPerThread = 12;  // so many that one thread's delay is made up for by the others

bool known_dtypes(const octavo_attention& g) {
    const auto floating = [](int dtype) { return dtype >= OCTAVO_FLOAT32 && dtype <= OCTAVO_FLOAT16; };
    return floating(g.dtype) && (floating(g.kv_dtype) || (g.kv_dtype == OCTAVO_INT8 && !g.latent));
}

bool sound_geometry(const octavo_attention& g) {
    const bool blocks = g.block_size >= 8 && (kChunk % g.block_size == 0 || g.block_size % kChunk == 0);
    const bool heads = g.num_kv_heads >= 1 && g.num_heads >= g.num_kv_heads && g.num_heads % g.num_kv_heads == 0;
    const bool sizes = g.head_size >= 1 && g.head_size <= 1024 && g.value_size >= 1 && g.value_size <= 1024;
    const bool latent = !g.latent || (g.num_kv_heads == 1 && g.value_size <= g.head_size);
    return blocks && heads && sizes && latent && g.window >= 0 && g.num_blocks >= 0;
}

// Tiles of a step and about how many products they take. Those of one KV head stand together, so that its keys and
// values stay near, long ones first.
int64_t cut_tiles(const octavo_attention& g, std::vector<Tile>& tiles) {
    const int group = g.num_heads / g.num_kv_heads;
    const int head_tiles = (group + kTileRows - 1) / kTileRows;
    const int heads = (group + head_tiles - 1) / head_tiles;
    const int parts = (group + heads - 1) / heads;
    const int tokens = std::max(1, kTileRows / heads);
    int64_t products = 0;
    for (int row = 0; row < g.num_rows; ++row) {
        const int length = g.query_start_loc[row + 1] - g.query_start_loc[row];
        if (length == 0) continue;
        const int before = g.seq_lens[row] - length;
        for (int i = 0; i < g.num_kv_heads * parts; ++i) {
            const int kv_head = i / parts, head = i % parts * heads;
            const int num_heads = std::min(heads, group - head);
            for (int token = (length - 1) / tokens * tokens; token >= 0; token -= tokens) {
                const int count = std::min(tokens, length - token);
                const int first_position = before + token, last_position = first_position + count - 1;
                const int first_seen = g.window > 0 ? std::max(0, first_position + 1 - g.window) : 0;
                const int first_chunk = first_seen / kChunk, last_chunk = last_position / kChunk;
                products += int64_t(count) * num_heads * (last_position + 1 - first_seen);
                tiles.push_back({row, kv_head, head, num_heads, token, count, first_chunk,
                                 last_chunk - first_chunk + 1});
            }
        }
    }
    return products * (g.head_size + g.value_size);
}

// The caller's lists, kept between calls.
struct WorkLists {
    std::vector<Tile> tiles;
    std::vector<Piece> pieces;
    std::vector<int64_t> first_pieces;
    std::vector<float> partials;
};

int run_in_scratch(void (*step)(const Attend&, float*, int64_t, int64_t), const Attend& a, int64_t scratch_bytes,
                   int64_t count, int64_t grain) {
    std::atomic<bool> starved{false};
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        auto* scratch = static_cast<float*>(thread_scratch(size_t(scratch_bytes)));
        if (scratch == nullptr) {
            starved.store(true, std::memory_order_relaxed);
        } else {
            step(a, scratch, begin, end);
        }
    });
    return starved.load(std::memory_order_relaxed) ? OCTAVO_NO_MEMORY : OCTAVO_OK;
}

int attend_split(const Kernels& k, Attend& a, WorkLists& lists, int64_t scratch_bytes, int64_t piece_grain) {
    const octavo_attention& g = *a.geometry;
    const int64_t floats_per_row = rounded_up(g.value_size, kValueAlign) + 2;
    int64_t offset = 0;
    lists.pieces.clear();
    lists.first_pieces.clear();
    for (size_t t = 0; t < lists.tiles.size(); ++t) {
        const Tile& tile = lists.tiles[t];
        lists.first_pieces.push_back(int64_t(lists.pieces.size()));
        for (int c = 0; c < tile.num_chunks; ++c) {
            lists.pieces.push_back({int(t), tile.first_chunk + c, offset});
            offset += tile.num_tokens * tile.num_heads * floats_per_row;
        }
    }
    if (int64_t(lists.partials.size()) < offset) lists.partials.resize(size_t(offset));
    a.pieces = lists.pieces.data();
    a.first_pieces = lists.first_pieces.data();
    a.partials = lists.partials.data();
    const int status = run_in_scratch(k.attend_pieces, a, scratch_bytes, int64_t(lists.pieces.size()), piece_grain);
    if (status != OCTAVO_OK) return status;
    return run_in_scratch(k.fold_tiles, a, scratch_bytes, int64_t(lists.tiles.size()), 16);
}

int attend_step(Attend& a) {
    static thread_local WorkLists lists;
    const Kernels& k = *kernels();
    const octavo_attention& g = *a.geometry;
    lists.tiles.clear();
    const int64_t products = cut_tiles(g, lists.tiles);
    const int64_t num_tiles = int64_t(lists.tiles.size());
    if (num_tiles == 0) return OCTAVO_OK;
    a.tiles = lists.tiles.data();
    const int64_t scratch_bytes = k.attend_scratch(g) * int64_t(sizeof(float));
    int64_t num_pieces = 0;
    for (const Tile& tile : lists.tiles) num_pieces += tile.num_chunks;
    // Where tiles are too few to share out evenly, their chunks are. The sums are the same either way.
    const bool split =
        num_threads() > 1 && num_tiles < 4 * num_threads() && num_pieces > num_tiles && products >= 2 * kGrainProducts;
    if (split) {
        return attend_split(k, a, lists, scratch_bytes, std::max<int64_t>(1, num_pieces * kGrainProducts / products));
    }
    // Within a range a tile fetches what the next one reads first, so ranges are as long as balance allows.
    const int64_t share = num_tiles / (kRangesPerThread * num_threads());
    const int64_t grain = std::max({int64_t(1), share, num_tiles * kGrainProducts / std::max<int64_t>(1, products)});
    return run_in_scratch(k.attend_tiles, a, scratch_bytes, num_tiles, grain);
}

}  // namespace

int64_t block_elements(const octavo_attention& g) {
    return g.num_kv_heads * head_elements(g);
}

int check_batch(const octavo_attention& g) {
    if (!known_dtypes(g)) return OCTAVO_BAD_DTYPE;
    if (!sound_geometry(g) || g.num_rows < 0) return OCTAVO_OUT_OF_RANGE;
    if (g.num_rows > 0 && g.query_start_loc[0] < 0) return OCTAVO_OUT_OF_RANGE;
    for (int row = 0; row < g.num_rows; ++row) {
        const int length = g.query_start_loc[row + 1] - g.query_start_loc[row];
        if (length < 0 || g.seq_lens[row] < length) return OCTAVO_OUT_OF_RANGE;
        if (length == 0) continue;
        const int64_t last_block = (g.seq_lens[row] - 1) / g.block_size;
        if (last_block >= g.block_table_stride) return OCTAVO_OUT_OF_RANGE;
        // Blocks that a window has left behind may be gone; nothing reads them.
        const int first_position = g.seq_lens[row] - length;
        const int first_seen = g.window > 0 ? std::max(0, first_position + 1 - g.window) : 0;
        const int32_t* table = g.block_table + row * g.block_table_stride;
        for (int64_t b = first_seen / g.block_size; b <= last_block; ++b) {
            if (table[b] < 0 || table[b] >= g.num_blocks) return OCTAVO_OUT_OF_RANGE;
        }
    }
    if (g.num_rows > 0 && g.query_start_loc[g.num_rows] > g.num_tokens) return OCTAVO_OUT_OF_RANGE;
    for (int t = 0; t < g.num_tokens; ++t) {
        if (g.slots[t] < -1 || g.slots[t] >= int64_t(g.num_blocks) * g.block_size) return OCTAVO_OUT_OF_RANGE;
    }
    return OCTAVO_OK;
}

int write_kv(const WriteKv& given) {
    const octavo_attention& g = *given.geometry;
    WriteKv a = given;
    if (g.latent) {  // a latent key is its own value
        a.value = a.key;
        a.value_token_stride = a.key_token_stride;
        a.value_head_stride = a.key_head_stride;
    }
    const auto function = kernels()->write_kv;
    const int64_t elements = 2 * int64_t(g.num_kv_heads) * g.head_size;
    parallel_for(g.num_tokens, std::max<int64_t>(1, kGrainElements / elements),
                 [&](int64_t begin, int64_t end) { function(a, begin, end); });
    return OCTAVO_OK;
}

int attend(Attend& a) {
    try {
        return attend_step(a);
    } catch (const std::bad_alloc&) {
        return OCTAVO_NO_MEMORY;
    }
}

}  // namespace octavo
