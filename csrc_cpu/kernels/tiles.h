// The tile registers of AMX: eight tiles of up to 16 rows of 64 bytes, whose sizes a thread configures before use.
//
// The instructions stand in assembly of our own. The compiler's intrinsics name no memory (those of gcc 12), or part
// of it, so it may drop or delay the stores that a tile is loaded from; here each one orders all memory around it.
#pragma once

#include "simd.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AMX_TILE__)
#define OCTAVO_TILES

constexpr bool kTiled = true;
constexpr int kTileHeight = 16;   // rows of a tile at most
constexpr int kTileRowBytes = 64;  // bytes of a row at most: 16 floats, 32 bfloat16, 64 int8
constexpr int kTileInputs = 32;    // bfloat16 of a row, which a product sums

// Sizes of the tiles, as ldtilecfg reads them. A tile of no rows is not used.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    constexpr void set(int tile, int64_t num_rows, int num_bytes = kTileRowBytes) {
        rows[tile] = uint8_t(num_rows);
        row_bytes[tile] = uint16_t(num_bytes);
    }
};
static_assert(sizeof(TileConfig) == 64);

// What the tiles of this thread are configured as; palette 0: they are released.
struct ThreadTiles {
    TileConfig config;
    constexpr ThreadTiles() : config() { config.palette = 0; }
};
static thread_local ThreadTiles thread_tiles;

OCTAVO_INLINE bool operator==(const TileConfig& a, const TileConfig& b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
}

// Configures this thread's tiles, which zeroes them; nothing is done where they are so already.
OCTAVO_INLINE void use_tiles(const TileConfig& config) {
    TileConfig& current = thread_tiles.config;
    if (current == config) return;
    current = config;
    __asm__ volatile("ldtilecfg %0" ::"m"(current) : "memory");
}

// A thread that holds tiles costs the system 8 KB at each switch, and keeps its core from resting.
inline void release_tiles() {
    TileConfig& current = thread_tiles.config;
    if (current.palette == 0) return;
    current.palette = 0;
    __asm__ volatile("tilerelease" ::: "memory");
}

template <int Tile>
OCTAVO_INLINE void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Rows lie `stride` bytes apart.
template <int Tile>
OCTAVO_INLINE void load_tile(const void* rows, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
OCTAVO_INLINE void store_tile(void* rows, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(Tile) : "memory");
}

// sum[rows][columns] += a[rows][pairs][2] times b, which holds [pairs][columns][2], in bfloat16. Inputs that are even
// and those that are odd have a sum each, in ascending order; subnormal numbers are zeros.
template <int Sum, int A, int B>
OCTAVO_INLINE void dot_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

// The same in int8: a[rows][quads][4] times b, which holds [quads][columns][4]; sums are int32.
template <int Sum, int A, int B>
OCTAVO_INLINE void dot_tiles_signed() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
OCTAVO_INLINE void dot_tiles_signed_unsigned() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
OCTAVO_INLINE void dot_tiles_unsigned_signed() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

#else

constexpr bool kTiled = false;
inline void release_tiles() {}

#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
