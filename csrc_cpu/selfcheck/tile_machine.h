// The tile unit of AMX in software, after the pseudo code of Intel's manual: eight tiles of at most 16 rows of 64
// bytes, and a configuration that says how much of each is used.
//
// What the processor refuses is refused with a reason. Two things are stricter: a configuration that resumes an
// interrupted instruction (start row) is refused, and so are half precision and complex products.
#pragma once

#include <xmmintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace octavo_tiles {

constexpr int kNumTiles = 8, kMaxRows = 16, kMaxRowBytes = 64;

// As in memory.
struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

using Complaint = const char*;  // null: none

// While one lives, subnormal numbers are zeros and sums round to nearest, whatever the thread's own settings.
class FlushedArithmetic {
public:
    FlushedArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
    ~FlushedArithmetic() { _mm_setcsr(before_); }

private:
    unsigned before_;
};

struct Tile {
    alignas(64) uint8_t bytes[kMaxRows][kMaxRowBytes];

    template <class T>
    T* row(int r) {
        return reinterpret_cast<T*>(bytes[r]);
    }
    template <class T>
    const T* row(int r) const {
        return reinterpret_cast<const T*>(bytes[r]);
    }
};

// sum[rows][columns] += a[rows][2 * pairs] times b, which holds [pairs][columns][2]. Even and odd inputs of a column
// have a sum each from zero; those two are added, and then to what was there.
inline __attribute__((always_inline)) void dot_bf16_rows(Tile& sum, const Tile& a, const Tile& b, int rows, int pairs,
                                                         int columns) {
    for (int m = 0; m < rows; ++m) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < pairs; ++k) {
            const uint32_t pair = a.row<uint32_t>(m)[k];
            const uint32_t even_bits = pair << 16, odd_bits = pair & 0xffff0000u;
            float even_a, odd_a, even_b[16], odd_b[16];
            std::memcpy(&even_a, &even_bits, 4);
            std::memcpy(&odd_a, &odd_bits, 4);
            uint32_t words[16];
            for (int n = 0; n < 16; ++n) words[n] = b.row<uint32_t>(k)[n] << 16;
            std::memcpy(even_b, words, 64);
            for (int n = 0; n < 16; ++n) words[n] = b.row<uint32_t>(k)[n] & 0xffff0000u;
            std::memcpy(odd_b, words, 64);
            for (int n = 0; n < 16; ++n) even[n] = __builtin_fmaf(even_a, even_b[n], even[n]);
            for (int n = 0; n < 16; ++n) odd[n] = __builtin_fmaf(odd_a, odd_b[n], odd[n]);
        }
        for (int n = 0; n < columns; ++n) sum.row<float>(m)[n] += even[n] + odd[n];
    }
}
inline __attribute__((target("avx2,fma"))) void dot_bf16_fused(Tile& sum, const Tile& a, const Tile& b, int rows,
                                                               int pairs, int columns) {
    dot_bf16_rows(sum, a, b, rows, pairs, columns);
}

// sum[rows][columns] += a[rows][quads][4] times b, which holds [quads][columns][4]; it wraps around.
template <class A, class B>
void dot_byte_rows(Tile& sum, const Tile& a, const Tile& b, int rows, int quads, int columns) {
    for (int m = 0; m < rows; ++m) {
        for (int k = 0; k < quads; ++k) {
            for (int n = 0; n < columns; ++n) {
                int32_t dot = 0;
                for (int i = 0; i < 4; ++i) dot += int32_t(a.row<A>(m)[4 * k + i]) * int32_t(b.row<B>(k)[4 * n + i]);
                sum.row<uint32_t>(m)[n] += uint32_t(dot);
            }
        }
    }
}

// One thread's tiles.
class Machine {
public:
    bool configured() const { return config_.palette != 0; }

    Complaint load_config(const void* memory) {
        Config config;
        std::memcpy(&config, memory, sizeof config);
        if (config.palette == 0) {
            release();
            return nullptr;
        }
        if (config.palette != 1) return "the palette is neither 0 nor 1";
        if (config.start_row != 0) return "the start row is not 0";
        for (const uint8_t byte : config.reserved) {
            if (byte) return "a reserved byte is not 0";
        }
        for (int t = 0; t < 16; ++t) {
            const int rows = config.rows[t], row_bytes = config.row_bytes[t];
            if (t >= kNumTiles && (rows || row_bytes)) return "a tile past the eighth is configured";
            if ((rows == 0) != (row_bytes == 0)) return "a tile has rows of no bytes, or bytes of no rows";
            if (rows > kMaxRows || row_bytes > kMaxRowBytes) return "a tile is larger than 16 rows of 64 bytes";
        }
        config_ = config;
        std::memset(tiles_, 0, sizeof tiles_);
        return nullptr;
    }

    void store_config(void* memory) const { std::memcpy(memory, &config_, sizeof config_); }

    void release() {
        std::memset(&config_, 0, sizeof config_);
        std::memset(tiles_, 0, sizeof tiles_);
    }

    Complaint zero(int tile) {
        if (!known(tile)) return kUnknown;
        std::memset(&tiles_[tile], 0, sizeof tiles_[tile]);
        return nullptr;
    }

    // `at(row)` gives the address of a row.
    template <class At>
    Complaint load(int tile, const At& at) {
        if (!known(tile)) return kUnknown;
        Tile fresh = {};
        for (int r = 0; r < config_.rows[tile]; ++r) std::memcpy(fresh.bytes[r], at(r), config_.row_bytes[tile]);
        tiles_[tile] = fresh;
        return nullptr;
    }
    template <class At>
    Complaint store(int tile, const At& at) const {
        if (!known(tile)) return kUnknown;
        for (int r = 0; r < config_.rows[tile]; ++r) std::memcpy(at(r), tiles_[tile].bytes[r], config_.row_bytes[tile]);
        return nullptr;
    }

    Complaint dot_bf16(int sum, int a, int b) {
        if (const Complaint complaint = mismatch(sum, a, b)) return complaint;
        const FlushedArithmetic flushed;
        static const bool fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const auto dot = fused ? dot_bf16_fused : dot_bf16_rows;
        dot(tiles_[sum], tiles_[a], tiles_[b], config_.rows[a], config_.rows[b], config_.row_bytes[b] / 4);
        return nullptr;
    }

    template <class A, class B>
    Complaint dot_bytes(int sum, int a, int b) {
        if (const Complaint complaint = mismatch(sum, a, b)) return complaint;
        dot_byte_rows<A, B>(tiles_[sum], tiles_[a], tiles_[b], config_.rows[a], config_.rows[b],
                            config_.row_bytes[b] / 4);
        return nullptr;
    }

private:
    static constexpr Complaint kUnknown = "a tile is not configured";

    bool known(int tile) const { return configured() && config_.rows[tile] != 0; }

    Complaint mismatch(int sum, int a, int b) const {
        if (!known(sum) || !known(a) || !known(b)) return kUnknown;
        if (sum == a || sum == b || a == b) return "the tiles of a product are not three";
        const Config& c = config_;
        if (c.row_bytes[sum] % 4 || c.row_bytes[a] % 4 || c.row_bytes[b] % 4) return "a row is not whole words";
        if (c.rows[sum] != c.rows[a]) return "sums and the first factor differ in rows";
        if (c.row_bytes[sum] != c.row_bytes[b]) return "sums and the second factor differ in columns";
        if (c.row_bytes[a] / 4 != c.rows[b]) return "the factors differ in inputs";
        return nullptr;
    }

    Config config_ = {};
    Tile tiles_[kNumTiles] = {};
};

}  // namespace octavo_tiles
