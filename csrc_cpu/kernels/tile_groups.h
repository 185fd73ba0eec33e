// Products of codes on the tiles of AMX, for 16 rows or more. A group of 32 inputs is a product of tiles: 16 rows of
// codes by 16 outputs, whose sums are stored, scaled and added by vectors. The integers are those that vectors get, and
// are added in the same order, so a row has the same bits either way.
#pragma once

#include "product.h"
#include "simd.h"
#include "table.h"
#include "tiles.h"

#if defined(OCTAVO_TILES)

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kGroupQuads = kGroup / 4;
constexpr int64_t kQuadBytes = kPanelColumns * 4;  // of a panel: four codes of each output

// Groups in turn have the sums of tile 0 or 1, the inputs of 4 or 5, the weights of 6 or 7.
inline TileConfig group_config() {
    TileConfig config;
    for (int slot = 0; slot < 2; ++slot) {
        config.set(slot, kTileHeight);
        config.set(4 + slot, kTileHeight, kGroup);
        config.set(6 + slot, kGroupQuads);
    }
    return config;
}

// A group's sums on their way from a tile to vectors, and its weights where they are to be unpacked for a tile.
struct GroupSlot {
    alignas(64) int32_t dots[kTileHeight][kLanes];
    alignas(64) char weights[kGroupQuads][64];
};

// Rows of inputs, 16, and a panel's outputs from `column` on, 16.
struct GroupTile {
    const char* codes;
    int64_t stride;  // of codes, in bytes
    const float* scales;
    const int32_t* starts;
    int64_t groups;  // of a row, and so from row to row of scales and starts
    const char* panel;
    int column;
};

template <int Slot, class Codes, class Fetch>
OCTAVO_INLINE void dot_group(const GroupTile& t, int64_t g, GroupSlot& slot, Fetch& fetch) {
    const char* const group = t.panel + g * kGroupBytes<Codes>;
    for (int64_t at = 0; at < Codes::kCodeBytes; at += kQuadBytes) fetch.weights(group, at + t.column * 4);
    fetch.step();
    load_tile<4 + Slot>(t.codes + g * kGroup, t.stride);
    if constexpr (Codes::kCodeBytes == kGroupQuads * kQuadBytes) {
        load_tile<6 + Slot>(group + t.column * 4, kQuadBytes);
    } else {
#pragma GCC unroll 8
        for (int q = 0; q < kGroupQuads; ++q) {
            const Words quad = Codes::quad(group + t.column * 4, q, 0);
            std::memcpy(slot.weights[q], &quad, sizeof quad);
        }
        load_tile<6 + Slot>(slot.weights, 64);
    }
    zero_tile<Slot>();
    dot_tiles_signed_unsigned<Slot, 4 + Slot, 6 + Slot>();
    store_tile<Slot>(slot.dots, 64);
}

// sums += a group's dots by its scales; and shares of minima, as vectors add them.
template <class Codes>
OCTAVO_INLINE void add_group(const GroupTile& t, int64_t g, const GroupSlot& slot, Floats* sums) {
    const char* const after = t.panel + g * kGroupBytes<Codes> + Codes::kCodeBytes;
    const auto* factors = reinterpret_cast<const Float16*>(after) + t.column;
    const Floats scale = load(factors), minima = Codes::kMinima ? load(factors + kPanelColumns) : scale;
#pragma GCC unroll 16
    for (int r = 0; r < kTileHeight; ++r) {
        const float x_scale = t.scales[r * t.groups + g];
        const int32_t* const start = t.starts + r * t.groups + g;
        Ints dots = (Ints)load_words(slot.dots[r]);
        if constexpr (Codes::kStarted) dots += (Ints)splat_word(start);
        sums[r] = fma(to_floats(dots), scale * x_scale, sums[r]);
        if constexpr (Codes::kMinima) sums[r] = fma(minima, splat(x_scale * float(*start)), sums[r]);
    }
}

// c[16][16 outputs] = the tile's product. A group's tiles are at work while vectors add the one before.
template <class Codes, class Fetch>
void multiply_group_tile(const GroupTile& tile, float* c, Fetch fetch) {
    const GroupTile t = tile;
    GroupSlot slots[2];
    Floats sums[kTileHeight] = {};
    dot_group<0, Codes>(t, 0, slots[0], fetch);
    for (int64_t g = 0; g < t.groups; g += 2) {
        if (g + 1 < t.groups) dot_group<1, Codes>(t, g + 1, slots[1], fetch);
        add_group<Codes>(t, g, slots[0], sums);
        if (g + 1 == t.groups) break;
        if (g + 2 < t.groups) dot_group<0, Codes>(t, g + 2, slots[0], fetch);
        add_group<Codes>(t, g + 1, slots[1], sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileHeight; ++r) store(c + r * kUnitColumns, sums[r]);
}

// c[rows][kUnitColumns] = rows of x times `panels` panels. The last tile repeats rows where they are no whole tiles.
template <class Codes>
void multiply_groups_on_tiles(const Product& p, float* c, int64_t row, int64_t rows, const char* panel, int panels) {
    static_assert(kLanes == 16 && !kSignedQuads);
    const Operand& x = p.x;
    const int64_t other_tiles = (rows - 1) / kTileHeight, half_lines = kGroupBytes<Codes> / 2 / 64;
    const int64_t lines = other_tiles ? (half_lines + other_tiles) / other_tiles : 0;
    use_tiles(group_config());
    for (int half = 0; half < 2 * panels; ++half) {
        const char* const w = panel + half / 2 * p.panel_bytes;
        const int column = half % 2 * kLanes;
        // The next unit's panel in the place of this one, half of it during each half.
        const char* next = w + panels * p.panel_bytes + half % 2 * (p.panel_bytes / 2);
        const char* const next_end = next + p.panel_bytes / 2;
        const auto tile = [&](int64_t r, auto fetch) {
            const int64_t at = row + r;
            const GroupTile t = {static_cast<const char*>(x.data) + at * x.stride,
                                 x.stride,
                                 x.scales + at * x.groups,
                                 x.starts + at * x.groups,
                                 x.groups,
                                 w,
                                 column};
            multiply_group_tile<Codes>(t, c + r * kUnitColumns + half * kLanes, fetch);
        };
        tile(0, FetchAhead<kAheadFew>());
        for (int64_t r = kTileHeight; r < rows; r += kTileHeight) {
            tile(smaller<int64_t>(r, rows - kTileHeight), FetchNext{next, next_end, lines});
        }
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
