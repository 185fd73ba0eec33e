// Packed matrices: their size, and how they are filled.

#include "pack.h"

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr int64_t kPanelGrain = 4;

// The row of the matrix that stands in a panel's column, or -1 for none. Panels of a gated matrix alternate.
int64_t row_at(const octavo_matrix& m, int64_t panel, int64_t column) {
    if (!m.gated) {
        const int64_t row = panel * kPanelColumns + column;
        return row < m.rows ? row : -1;
    }
    const int64_t width = m.rows / 2, row = panel / 2 * kPanelColumns + column;
    return row < width ? panel % 2 * width + row : -1;
}

float widened(const void* weights, int64_t at, int dtype) {
    if (dtype == OCTAVO_FLOAT32) return static_cast<const float*>(weights)[at];
    const uint16_t bits = static_cast<const uint16_t*>(weights)[at];
    uint32_t wide = uint32_t(bits) << 16;
    if (dtype == OCTAVO_FLOAT16) {
        // The exponent moves by 112, which the product does exactly, subnormals included.
        float scaled;
        wide = uint32_t(bits & 0x7fff) << 13;
        std::memcpy(&scaled, &wide, sizeof scaled);
        scaled *= 0x1p112f;
        std::memcpy(&wide, &scaled, sizeof wide);
        if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000u;
        wide |= uint32_t(bits & 0x8000) << 16;
    }
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

void pack_floats(float* panel, const octavo_matrix& m, const void* weights, int dtype, int64_t index) {
    const int64_t cols = padded_cols(m);
    for (int64_t column = 0; column < kPanelColumns; ++column) {
        const int64_t row = row_at(m, index, column);
        for (int64_t k = 0; k < cols; ++k) {
            const bool there = row >= 0 && k < m.cols;
            panel[k * kPanelColumns + column] = there ? widened(weights, row * m.cols + k, dtype) : 0.0f;
        }
    }
}

void pack_pairs(uint16_t* panel, const octavo_matrix& m, const void* weights, int dtype, int64_t index) {
    const int64_t cols = padded_cols(m);
    for (int64_t column = 0; column < kPanelColumns; ++column) {
        const int64_t row = row_at(m, index, column);
        uint16_t* to = panel + column * 2;
        if (row < 0) {
            for (int64_t k = 0; k < cols; k += 2) to[k * kPanelColumns] = to[k * kPanelColumns + 1] = 0;
            continue;
        }
        int64_t k = 0;
        if (dtype == OCTAVO_BFLOAT16) {
            const uint16_t* from = static_cast<const uint16_t*>(weights) + row * m.cols;
            for (; k + 2 <= m.cols; k += 2) std::memcpy(to + k * kPanelColumns, from + k, 4);
        }
        for (; k < cols; ++k) {
            to[k / 2 * 2 * kPanelColumns + k % 2] = k < m.cols ? rounded(widened(weights, row * m.cols + k, dtype)) : 0;
        }
    }
}

struct Groups {
    const uint8_t* codes;
    const uint16_t* scales;
    const uint16_t* minima;
};

void pack_codes(uint8_t* panel, const octavo_matrix& m, const Groups& from, int64_t index) {
    const bool wide = m.format == OCTAVO_FORMAT_INT8;
    const int64_t groups = m.cols / kGroup, code_bytes = kGroup * kPanelColumns / (wide ? 1 : 2);
    const int64_t group_bytes = panel_bytes(m) / groups;
    std::memset(panel, 0, size_t(panel_bytes(m)));
    for (int64_t column = 0; column < kPanelColumns; ++column) {
        const int64_t row = row_at(m, index, column);
        if (row < 0) continue;  // scale and minimum zero
        const uint8_t* codes = from.codes + row * m.cols / (wide ? 1 : 2);
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t* group = panel + g * group_bytes;
            for (int64_t i = 0; i < kGroup; ++i) {
                const int64_t k = g * kGroup + i, quad = i / 4;
                if (wide) {
                    group[(quad * kPanelColumns + column) * 4 + i % 4] = codes[k];
                } else {
                    const uint8_t code = k % 2 ? codes[k / 2] >> 4 : codes[k / 2] & 15;
                    group[(quad % 4 * kPanelColumns + column) * 4 + i % 4] |= uint8_t(quad < 4 ? code : code << 4);
                }
            }
            std::memcpy(group + code_bytes + column * 2, from.scales + row * groups + g, 2);
            if (from.minima) {
                std::memcpy(group + code_bytes + kPanelColumns * 2 + column * 2, from.minima + row * groups + g, 2);
            }
        }
    }
}

bool sound(const octavo_matrix& m) {
    return m.rows >= 1 && m.cols >= 1 && panel_bytes(m) > 0 && (!m.gated || m.rows % 2 == 0);
}

}  // namespace

int64_t padded_cols(const octavo_matrix& m) { return (m.cols + kGroup - 1) / kGroup * kGroup; }

int64_t num_panels(const octavo_matrix& m) {
    const int64_t rows = m.gated ? m.rows / 2 : m.rows;
    return (rows + kPanelColumns - 1) / kPanelColumns * (m.gated ? 2 : 1);
}

int64_t panel_bytes(const octavo_matrix& m) {
    const int64_t inputs = padded_cols(m) * kPanelColumns, factors = padded_cols(m) / kGroup * kPanelColumns * 2;
    switch (m.format) {
        case OCTAVO_FORMAT_FLOAT32: return inputs * 4;
        case OCTAVO_FORMAT_BFLOAT16: return inputs * 2;
        case OCTAVO_FORMAT_INT8: return inputs + factors;
        case OCTAVO_FORMAT_INT4: return inputs / 2 + factors;
        case OCTAVO_FORMAT_INT4_MIN: return inputs / 2 + 2 * factors;
        default: return 0;
    }
}

}  // namespace octavo

using namespace octavo;

extern "C" {

int64_t octavo_packed_bytes(const octavo_matrix* m) { return sound(*m) ? panel_bytes(*m) * num_panels(*m) : 0; }

int octavo_pack_dense(void* packed, const octavo_matrix* m, const void* weights, int dtype) {
    if (dtype < OCTAVO_FLOAT32 || dtype > OCTAVO_FLOAT16) return OCTAVO_BAD_DTYPE;
    if (!sound(*m) || m->format > OCTAVO_FORMAT_BFLOAT16) return OCTAVO_OUT_OF_RANGE;
    const int64_t bytes = panel_bytes(*m);
    parallel_for(num_panels(*m), kPanelGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            char* panel = static_cast<char*>(packed) + i * bytes;
            if (m->format == OCTAVO_FORMAT_FLOAT32) {
                pack_floats(reinterpret_cast<float*>(panel), *m, weights, dtype, i);
            } else {
                pack_pairs(reinterpret_cast<uint16_t*>(panel), *m, weights, dtype, i);
            }
        }
    });
    return OCTAVO_OK;
}

int octavo_pack_groups(void* packed, const octavo_matrix* m, const uint8_t* codes, const void* scales,
                       const void* minima) {
    const bool grouped = m->format >= OCTAVO_FORMAT_INT8 && m->format <= OCTAVO_FORMAT_INT4_MIN;
    if (!sound(*m) || !grouped || m->cols % kGroup || (m->format == OCTAVO_FORMAT_INT4_MIN) != (minima != nullptr)) {
        return OCTAVO_OUT_OF_RANGE;
    }
    const Groups from = {codes, static_cast<const uint16_t*>(scales), static_cast<const uint16_t*>(minima)};
    const int64_t bytes = panel_bytes(*m);
    parallel_for(num_panels(*m), kPanelGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            pack_codes(static_cast<uint8_t*>(packed) + i * bytes, *m, from, i);
        }
    });
    return OCTAVO_OK;
}

int octavo_unpack_rows(float* out, const octavo_matrix* m, const int64_t* ids, int64_t n) {
    if (!sound(*m) || m->gated) return OCTAVO_OUT_OF_RANGE;
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] < 0 || ids[i] >= m->rows) return OCTAVO_OUT_OF_RANGE;
    }
    const auto unpack = kernels()->unpack;
    parallel_for(n, 16, [&](int64_t begin, int64_t end) { unpack(out, *m, panel_bytes(*m), ids, begin, end); });
    return OCTAVO_OK;
}

}  // extern "C"
