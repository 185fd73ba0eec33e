// Inputs of products: floats are stored as the product wants them, a group of 32 at a time.
#pragma once

#include "numeric.h"
#include "simd.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kGroupVectorCount = kGroup / kLanes;

// The nearest integers, ties to even, of |x| < 2^22.
OCTAVO_INLINE Ints round_to_ints(Floats x) {
    const float magic = 0x1.8p23f;
    return (Ints)(x + magic) - 0x4b400000;
}

// One group as codes: x = scale * code, the largest one 127 in size. NaN stays one by its scale.
OCTAVO_INLINE void store_codes(const Operand& to, int64_t row, int64_t group, const Floats* x) {
    Floats top = absolute(x[0]);
    Floats total = x[0];
    for (int v = 1; v < kGroupVectorCount; ++v) {
        top = max(top, absolute(x[v]));
        total += x[v];
    }
    const float largest = maximum(top), any = sum(total);
    const bool finite = any - any == 0.0f;
    const float scale = finite ? largest * (1.0f / 127.0f) : any - any;
    const float inverse = finite && largest > 1e-30f ? 127.0f / largest : 0.0f;
    auto* codes = static_cast<int8_t*>(to.data) + row * to.stride + group * kGroup;
    Ints code_sum = {};
    for (int v = 0; v < kGroupVectorCount; ++v) {
        const Ints code = inverse == 0.0f ? Ints{} : round_to_ints(x[v] * inverse);
        code_sum += code;
        store_bytes(codes + v * kLanes, code);
    }
    to.scales[row * to.groups + group] = scale;
    to.starts[row * to.groups + group] = to.start_factor * sum(code_sum);
}

OCTAVO_INLINE void store_group(const Operand& to, int64_t row, int64_t group, const Floats* x) {
    const int64_t at = row * to.stride + group * kGroup;
    switch (to.format) {
        case OCTAVO_FORMAT_FLOAT32:
            for (int v = 0; v < kGroupVectorCount; ++v) store(static_cast<float*>(to.data) + at + v * kLanes, x[v]);
            return;
        case OCTAVO_FORMAT_BFLOAT16:
            for (int v = 0; v < kGroupVectorCount; ++v) store_input(static_cast<BFloat16*>(to.data) + at + v * kLanes, x[v]);
            return;
        default: return store_codes(to, row, group, x);
    }
}

// Groups of a row of `size` floats: value(offset) gives a vector. What lies past the size is zero.
template <class Value>
OCTAVO_INLINE void store_row(const Operand& to, int64_t row, int64_t size, const Value& value) {
    for (int64_t group = 0; group < to.groups; ++group) {
        Floats x[kGroupVectorCount];
        for (int v = 0; v < kGroupVectorCount; ++v) {
            const int64_t at = group * kGroup + v * kLanes;
            x[v] = at < size ? value(at, smaller<int64_t>(kLanes, size - at)) : splat(0.0f);
        }
        store_group(to, row, group, x);
    }
}

template <class T>
OCTAVO_INLINE Floats load_some(const T* p, int64_t n) {
    return n == kLanes ? load(p) : load_first(p, n);
}

template <class T>
OCTAVO_INLINE void put_first(T* to, Floats x, int64_t n) {
    if (n == kLanes) {
        store(to, x);
    } else {
        store_first(to, x, n);
    }
}

template <class T>
void convert_rows(const Convert& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        store_row(a.to, row, a.size, [&](int64_t at, int64_t n) OCTAVO_LAMBDA { return load_some(x + at, n); });
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
