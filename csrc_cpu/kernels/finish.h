// What becomes of a unit's results c[rows][kUnitColumns], while they are in the first cache.
#pragma once

#include "elementwise.h"
#include "multiply.h"
#include "operand.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

// A vector of results with its bias; columns past the last one have none.
OCTAVO_INLINE Floats with_bias(const Product& p, const float* c, int64_t column) {
    const Floats x = load(c);
    if (!p.weight.bias) return x;
    const int64_t n = p.weight.rows - column;
    return n >= kLanes ? x + load(p.weight.bias + column) : n > 0 ? x + load_first(p.weight.bias + column, n) : x;
}

OCTAVO_INLINE Floats logits_of(const Product& p, Floats x) {
    if (p.scale != 1.0f) x = x * p.scale;
    return p.softcap > 0.0f ? tanh(x * (1.0f / p.softcap)) * p.softcap : x;
}

// body(results, column, number that count) for each vector of a row. `Whole`: all count, and there is no bias.
template <bool Whole, class Body>
OCTAVO_INLINE void for_each_result(const Product& p, const float* c, int64_t panel, int panels, const Body& body) {
    for (int v = 0; v < panels * kPanelVectors; ++v) {
        const int64_t column = panel * kPanelColumns + v * kLanes;
        if constexpr (Whole) {
            body(load(c + v * kLanes), column, int64_t(kLanes));
        } else {
            if (column >= p.weight.rows) return;
            body(with_bias(p, c + v * kLanes, column), column, smaller<int64_t>(kLanes, p.weight.rows - column));
        }
    }
}

// The largest result of a unit and the first column that has it; id -1 where one is not a number.
template <bool Whole>
OCTAVO_INLINE void finish_best(const Product& p, const float* c, int64_t row, int64_t panel, int panels) {
    const float none = -__builtin_inff();
    Floats top = splat(none), kept[kUnitVectors];
    uint32_t odd = 0;
    int num = 0;
    for_each_result<Whole>(p, c, panel, panels, [&](Floats x, int64_t, int64_t n) OCTAVO_LAMBDA {
        x = logits_of(p, x);
        if (n < kLanes) {
            float lanes[kLanes];
            store(lanes, x);
            for (int64_t i = n; i < kLanes; ++i) lanes[i] = none;
            x = load(lanes);
        }
        odd |= lanes_where(x != x);
        top = max(x, top);
        kept[num++] = x;
    });
    const float best = maximum(top);
    int32_t id = -1;
    for (int v = 0; v < num && !odd && id < 0; ++v) {
        const uint32_t found = lanes_where(kept[v] == best);
        if (found) id = int32_t(panel * kPanelColumns) + v * kLanes + __builtin_ctz(found);
    }
    const int64_t at = row * p.num_units + panel / 2;
    p.best_values[at] = best;
    p.best_ids[at] = id;
}

// The inputs of the next product: of a gated unit half as many as results.
template <int Activation>
OCTAVO_INLINE void finish_operand(const Product& p, const float* c, int64_t row, int64_t panel, int panels) {
    if (p.weight.gated) {
        const int64_t width = p.weight.rows / 2, column = panel / 2 * kPanelColumns;
        Floats x[kGroupVectorCount];
        for (int v = 0; v < kGroupVectorCount; ++v) {
            Floats x_gate = load(c + v * kLanes), up = load(c + kPanelColumns + v * kLanes);
            const int64_t at = column + v * kLanes, n = smaller<int64_t>(kLanes, width - at);
            if (p.weight.bias && n > 0) {
                x_gate = x_gate + load_some(p.weight.bias + at, n);
                up = up + load_some(p.weight.bias + width + at, n);
            }
            x[v] = gate<Activation>(x_gate, up);
        }
        return store_group(p.to, row, panel / 2, x);
    }
    for (int i = 0; i < panels; ++i) {
        Floats x[kGroupVectorCount];
        for (int v = 0; v < kGroupVectorCount; ++v) {
            const int64_t column = (panel + i) * kPanelColumns + v * kLanes;
            x[v] = column < p.weight.rows ? activate<Activation>(with_bias(p, c + i * kPanelColumns + v * kLanes, column))
                                          : splat(0.0f);
            if (column < p.weight.rows && p.weight.rows - column < kLanes) {
                float lanes[kLanes];
                store(lanes, x[v]);
                x[v] = load_first(lanes, p.weight.rows - column);
            }
        }
        store_group(p.to, row, panel + i, x);
    }
}

// Rows [row, row + rows) of a unit, by what becomes of them.
template <bool Whole>
void finish_rows(const Product& p, const float* c, int64_t row, int64_t rows, int64_t panel, int panels) {
    const auto each = [&](auto* out, const auto& put) OCTAVO_LAMBDA {
        out += row * p.out_stride;
        for (int64_t r = 0; r < rows; ++r, out += p.out_stride) {
            for_each_result<Whole>(p, c + r * kUnitColumns, panel, panels, [&](Floats x, int64_t at, int64_t n)
                                                                               OCTAVO_LAMBDA { put(out + at, x, n); });
        }
    };
    const auto store_some = [](auto* out, Floats x, int64_t n) OCTAVO_LAMBDA { put_first(out, x, n); };
    auto* const floats = static_cast<float*>(p.out);
    switch (p.finish) {
        case kStore: return each(floats, store_some);
        case kStoreBf16: return each(static_cast<BFloat16*>(p.out), store_some);
        case kStoreLogits:
            return each(floats, [&](float* out, Floats x, int64_t n)
                                    OCTAVO_LAMBDA { put_first(out, logits_of(p, x), n); });
        case kAdd:
            return each(floats, [&](float* out, Floats x, int64_t n)
                                    OCTAVO_LAMBDA { put_first(out, fma(x, splat(p.scale), load_some(out, n)), n); });
        case kBest:
            for (int64_t r = 0; r < rows; ++r) {
                finish_best<Whole>(p, c + r * kUnitColumns, row + r, panel, panels);
            }
            return;
        default: break;
    }
    const auto operands = [&](auto kind) {
        for (int64_t r = 0; r < rows; ++r) {
            finish_operand<decltype(kind)::kind>(p, c + r * kUnitColumns, row + r, panel, panels);
        }
    };
    if (p.activation == OCTAVO_SWIGLU_CLAMPED) return operands(KindOf<OCTAVO_SWIGLU_CLAMPED>());
    with_activation(p.activation, operands);
}

inline void finish(const Product& p, const float* c, int64_t row, int64_t rows, int64_t panel, int panels) {
    if (!p.weight.bias && (panel + panels) * kPanelColumns <= p.weight.rows) {
        finish_rows<true>(p, c, row, rows, panel, panels);
    } else {
        finish_rows<false>(p, c, row, rows, panel, panels);
    }
}

inline void product(const Product& p, float* scratch, int64_t row, int64_t rows, int64_t panel, int panels) {
    multiply(p, scratch, row, rows, panel, panels);
    finish(p, scratch, row, rows, panel, panels);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
