// Products of bfloat16 on the tiles of AMX, for any number of rows.
//
// A tile of inputs is up to 16 rows by 32 inputs, as they lie. A tile of weights is 32 inputs by 16 outputs: half of
// each row of a panel, [inputs / 2][32 outputs][2], as it is packed. The sums of 32 rows and the 32 outputs of a panel
// fill four tiles. Every result is the sum over its blocks of 32 inputs in ascending order, whatever tile it is in, so
// a row has the same bits alone and among others.
#pragma once

#include "numeric.h"
#include "simd.h"
#include "table.h"
#include "tiles.h"

#if defined(OCTAVO_TILES)

namespace octavo {
namespace OCTAVO_ISA {

constexpr int64_t kPanelRowBytes = kPanelColumns * 4;                     // a pair of inputs of each output
constexpr int64_t kBlockBytes = kTileInputs / 2 * kPanelRowBytes;         // a panel's weights of 32 inputs
constexpr int64_t kBlockLines = kBlockBytes / 64;
constexpr int64_t kSumStride = kUnitColumns * int64_t(sizeof(float));
static_assert(kTwoTiles == 2 * kTileHeight && kGroup == kTileInputs);

// Blocks of inputs whose weights, 24 KB, stay in the first cache while rows pass by: beyond it two tiles of inputs and
// two of weights a step ask the second cache for more than it gives.
constexpr int64_t kSpanBlocks = 12;
constexpr int64_t kTileAhead = 8192;  // bytes of weights fetched ahead, where they come from memory

// What a step fetches besides its own tiles: the panel's weights further on, into the first cache,
struct FetchPanel {
    OCTAVO_INLINE void step(const char* block) const {
        for (int64_t i = 0; i < kBlockLines; ++i) prefetch(block, kTileAhead + i * 64);
    }
};
// or the weights of the next unit, `lines` at a time, into the second.
struct FetchUnit {
    const char*& next;
    const char* end;
    int64_t lines;
    OCTAVO_INLINE void step(const char*) const {
        for (int64_t i = 0; i < lines && next < end; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// Sums of the first tile of rows are tiles 0 and 1, of the second 2 and 3; inputs are 4 and 5, weights 6 and 7.
inline TileConfig tile_config(int64_t rows) {
    const int64_t first = smaller<int64_t>(rows, kTileHeight);
    const int64_t second = smaller<int64_t>(rows - first, kTileHeight);
    TileConfig config;
    config.set(0, first);
    config.set(1, first);
    config.set(4, first);
    if (second) {
        config.set(2, second);
        config.set(3, second);
        config.set(5, second);
    }
    config.set(6, kTileInputs / 2);
    config.set(7, kTileInputs / 2);
    return config;
}

// Rows of inputs, and where the sums of a panel go.
struct TileRows {
    const char* x;
    int64_t x_bytes;  // from row to row
    float* c;         // [rows][kUnitColumns]

    TileRows from(int64_t row) const { return {x + row * x_bytes, x_bytes, c + row * kUnitColumns}; }
};

template <int Tile>
OCTAVO_INLINE void start_sums(const TileRows& rows, bool first) {
    float* const c = rows.c + Tile / 2 * kTileHeight * kUnitColumns + Tile % 2 * 16;
    if (first) {
        zero_tile<Tile>();
    } else {
        load_tile<Tile>(c, kSumStride);
    }
}
template <int Tile>
OCTAVO_INLINE void keep_sums(const TileRows& rows) {
    store_tile<Tile>(rows.c + Tile / 2 * kTileHeight * kUnitColumns + Tile % 2 * 16, kSumStride);
}

// c += x times blocks [begin, end) of a panel, from zero at block 0. Two: a second tile of rows follows the first.
template <bool Two, class Fetch>
OCTAVO_INLINE void multiply_blocks(const TileRows& rows, const char* panel, int64_t begin, int64_t end, Fetch fetch) {
    start_sums<0>(rows, begin == 0);
    start_sums<1>(rows, begin == 0);
    if constexpr (Two) {
        start_sums<2>(rows, begin == 0);
        start_sums<3>(rows, begin == 0);
    }
    const char* const second = rows.x + kTileHeight * rows.x_bytes;
    for (int64_t b = begin; b < end; ++b) {
        const char* const block = panel + b * kBlockBytes;
        load_tile<4>(rows.x + b * kTileRowBytes, rows.x_bytes);
        load_tile<6>(block, kPanelRowBytes);
        dot_tiles<0, 4, 6>();
        load_tile<7>(block + kTileRowBytes, kPanelRowBytes);
        dot_tiles<1, 4, 7>();
        if constexpr (Two) {
            load_tile<5>(second + b * kTileRowBytes, rows.x_bytes);
            dot_tiles<2, 5, 6>();
            dot_tiles<3, 5, 7>();
        }
        fetch.step(block);
    }
    keep_sums<0>(rows);
    keep_sums<1>(rows);
    if constexpr (Two) {
        keep_sums<2>(rows);
        keep_sums<3>(rows);
    }
}

// 32 rows or more, two tiles at a time. Rows past the last pair are computed with some that have been already, so that
// the tiles' sizes stay: all their inputs at once, as a sum begun elsewhere must not be added to twice.
inline void multiply_many_rows(const TileRows& rows, int64_t num_rows, const char* panel, int64_t blocks,
                               const char* next_panel) {
    const int64_t pairs = num_rows / kTwoTiles, rest = num_rows % kTwoTiles;
    const int64_t spans = (blocks + kSpanBlocks - 1) / kSpanBlocks, span = (blocks + spans - 1) / spans;
    const int64_t other_steps = blocks * (pairs - 1 + (rest != 0));
    const char* next = next_panel;
    const FetchUnit fetch_unit = {next, next_panel + blocks * kBlockBytes,
                                  other_steps ? (blocks * kBlockLines + other_steps - 1) / other_steps : 0};
    for (int64_t begin = 0; begin < blocks; begin += pairs == 1 ? blocks : span) {
        const int64_t end = pairs == 1 ? blocks : smaller(blocks, begin + span);
        multiply_blocks<true>(rows, panel, begin, end, FetchPanel());
        for (int64_t i = 1; i < pairs; ++i) {
            multiply_blocks<true>(rows.from(i * kTwoTiles), panel, begin, end, fetch_unit);
        }
    }
    if (rest == 0) return;
    if (rest <= kTileHeight) {
        multiply_blocks<false>(rows.from(num_rows - kTileHeight), panel, 0, blocks, fetch_unit);
    } else {
        multiply_blocks<true>(rows.from(num_rows - kTwoTiles), panel, 0, blocks, fetch_unit);
    }
}

// c[rows][kUnitColumns] = rows of x times `panels` panels.
inline void multiply_on_tiles(const Product& p, float* c, int64_t row, int64_t num_rows, const char* panel, int panels) {
    const int64_t x_bytes = p.x.stride * 2, blocks = p.x.groups;
    TileRows rows = {static_cast<const char*>(p.x.data) + row * x_bytes, x_bytes, c};
    use_tiles(tile_config(num_rows));
    for (int i = 0; i < panels; ++i, panel += p.panel_bytes, rows.c += kPanelColumns) {
        if (num_rows <= kTileHeight) {
            multiply_blocks<false>(rows, panel, 0, blocks, FetchPanel());
        } else if (num_rows < kTwoTiles) {
            multiply_blocks<true>(rows, panel, 0, blocks, FetchPanel());
        } else {
            multiply_many_rows(rows, num_rows, panel, blocks, panel + panels * p.panel_bytes);
        }
    }
}

// So many rounds of products alone. Returns how many operations a round has.
inline int64_t probe_tiles(int64_t rounds) {
    use_tiles(tile_config(kTwoTiles));
    for (int64_t r = 0; r < rounds; ++r) {
        dot_tiles<0, 4, 6>();
        dot_tiles<1, 4, 7>();
        dot_tiles<2, 5, 6>();
        dot_tiles<3, 5, 7>();
    }
    return 4 * kTileHeight * kTileHeight * kTileInputs * 2;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
