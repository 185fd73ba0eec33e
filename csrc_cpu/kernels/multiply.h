// A unit's product, by the format of its weights and the number of its rows.
#pragma once

#include "product.h"
#include "table.h"
#include "tile_groups.h"
#include "tile_product.h"

namespace octavo {
namespace OCTAVO_ISA {

template <class Codes>
void multiply_codes(const Product& p, float* c, int64_t row, int64_t rows, const char* w, int panels) {
#if defined(OCTAVO_TILES)
    if (rows >= kTileHeight) return multiply_groups_on_tiles<Codes>(p, c, row, rows, w, panels);
#endif
    multiply_groups<Codes>(p, c, row, rows, w, panels * kPanelVectors);
}

// c[rows][kUnitColumns] = rows of x times `panels` panels.
inline void multiply(const Product& p, float* c, int64_t row, int64_t rows, int64_t panel, int panels) {
    const char* w = static_cast<const char*>(p.weight.data) + panel * p.panel_bytes;
    const int vectors = panels * kPanelVectors;
    switch (p.weight.format) {
        case OCTAVO_FORMAT_FLOAT32: return multiply_dense<FloatWord>(p, c, row, rows, w, vectors);
#if defined(OCTAVO_TILES)
        case OCTAVO_FORMAT_BFLOAT16: return multiply_on_tiles(p, c, row, rows, w, panels);
#else
        case OCTAVO_FORMAT_BFLOAT16: return multiply_dense<PairWord>(p, c, row, rows, w, vectors);
#endif
        case OCTAVO_FORMAT_INT8: return multiply_codes<Int8Codes>(p, c, row, rows, w, panels);
        case OCTAVO_FORMAT_INT4: return multiply_codes<Int4Codes>(p, c, row, rows, w, panels);
        default: return multiply_codes<Int4MinCodes>(p, c, row, rows, w, panels);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
