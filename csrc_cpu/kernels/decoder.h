// What stands between a decoder's products: norms of the residual stream, rotation, rows of the embedding.
#pragma once

#include "elementwise.h"
#include "norm.h"
#include "operand.h"
#include "product.h"

namespace octavo {
namespace OCTAVO_ISA {

// The mean that a norm takes away and the factor that it multiplies by.
struct NormFactors {
    float mean = 0.0f, scale = 1.0f;

    NormFactors(const octavo_norm& norm, const float* x, int64_t size) {
        if (norm.kind == 0) return;
        if (norm.kind == 2) mean = sum_of(x, size) / float(size);
        scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, size, mean) / float(size) + norm.eps);
    }

    // Element `at` of a row, where `weight_at` is its place in the weights.
    OCTAVO_INLINE Floats apply(const octavo_norm& norm, Floats x, int64_t weight_at, int64_t n) const {
        if (norm.kind == 0) return x;
        x = (x - mean) * scale;
        if (norm.weight) x = x * load_some(norm.weight + weight_at, n);
        return norm.bias ? x + load_some(norm.bias + weight_at, n) : x;
    }
};

inline void prepare_rows(const Prepare& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* x = a.x + row * a.x_stride;
        const NormFactors factors(a.norm, x, a.hidden);
        const auto value = [&](int64_t at, int64_t n)
                               OCTAVO_LAMBDA { return factors.apply(a.norm, load_some(x + at, n), at, n); };
        if (!a.out) {
            store_row(a.to, row, a.hidden, value);
            continue;
        }
        float* out = a.out + row * a.out_stride;
        for (int64_t at = 0; at < a.hidden; at += kLanes) {
            const int64_t n = smaller<int64_t>(kLanes, a.hidden - at);
            const Floats y = value(at, n);
            put_first(out + at, a.add ? fma(y, splat(a.scale), load_some(out + at, n)) : y, n);
        }
    }
}

// Queries or keys of one token in place: `heads` heads of `size`.
inline void norm_heads(const octavo_norm& norm, int over, float* x, int64_t heads, int64_t size) {
    if (over == OCTAVO_OVER_ALL_HEADS) {
        size *= heads;
        heads = 1;
    }
    for (int64_t h = 0; h < heads; ++h, x += size) {
        const NormFactors factors(norm, x, size);
        const int64_t weight_at = over == OCTAVO_OVER_EACH_HEAD ? h * size : 0;
        for (int64_t at = 0; at < size; at += kLanes) {
            const int64_t n = smaller<int64_t>(kLanes, size - at);
            put_first(x + at, factors.apply(norm, load_some(x + at, n), weight_at + at, n), n);
        }
    }
}

inline void rotate_row(const Rotate& a, float* row, int64_t position) {
    const octavo_layer& layer = *a.layer;
    const int64_t size = a.head_size, queries = a.num_heads, keys = a.num_kv_heads;
    if (layer.q_norm.kind) norm_heads(layer.q_norm, layer.qk_norm_over, row, queries, size);
    if (layer.k_norm.kind) norm_heads(layer.k_norm, layer.qk_norm_over, row + queries * size, keys, size);
    if (layer.qkv_clip > 0.0f) {
        const Floats top = splat(layer.qkv_clip);
        for_each_vector((queries + 2 * keys) * size, [&](int64_t i, auto get, auto put) OCTAVO_LAMBDA {
            const Floats x = get(row + i);
            put(row + i, x > top ? top : x < -top ? -top : x);
        });
    }
    if (!layer.cos_sin) return;
    const int64_t half = layer.rotary_dim / 2;
    const float* cos = layer.cos_sin + position * layer.rotary_dim;
    for (int64_t h = 0; h < queries + keys; ++h) {
        if (layer.interleaved) {
            rotate_pairs(row + h * size, cos, cos + half, half);
        } else {
            rotate_halves(row + h * size, cos, cos + half, half);
        }
    }
}

inline void rotate_rows(const Rotate& a, int64_t begin, int64_t end) {
    const int64_t size = int64_t(a.num_heads + 2 * a.num_kv_heads) * a.head_size;
    for (int64_t token = begin; token < end; ++token) {
        float* row = const_cast<float*>(a.qkv) + token * a.stride;
        rotate_row(a, row, a.positions[token]);
        if (a.dtype == OCTAVO_BFLOAT16) {
            BFloat16* out = static_cast<BFloat16*>(a.out) + token * a.stride;
            for_each_vector(size, [&](int64_t i, auto get, auto put) OCTAVO_LAMBDA { put(out + i, get(row + i)); });
        }
    }
}

// Rows of a packed matrix as floats.
inline float unpacked(const octavo_matrix& m, const char* panel, int column, int64_t input) {
    const int64_t group = input / kGroup, within = input % kGroup;
    switch (m.format) {
        case OCTAVO_FORMAT_FLOAT32: return reinterpret_cast<const float*>(panel)[input * kPanelColumns + column];
        case OCTAVO_FORMAT_BFLOAT16: {
            const uint32_t bits = reinterpret_cast<const uint16_t*>(panel)[(input / 2 * kPanelColumns + column) * 2 + input % 2];
            const uint32_t wide = bits << 16;
            float x;
            std::memcpy(&x, &wide, sizeof x);
            return x;
        }
        default: break;
    }
    const bool wide = m.format == OCTAVO_FORMAT_INT8, minima = m.format == OCTAVO_FORMAT_INT4_MIN;
    const int64_t code_bytes = wide ? Int8Codes::kCodeBytes : Int4Codes::kCodeBytes;
    const char* codes = panel + group * (code_bytes + kPanelColumns * 2 * (minima ? 2 : 1));
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
    const int64_t quad = within / 4, row = wide ? quad : quad % 4;
    const uint8_t byte = bytes[(row * kPanelColumns + column) * 4 + within % 4];
    const int code = wide ? byte : quad < 4 ? byte & 15 : byte >> 4;
    const auto* factors = reinterpret_cast<const Float16*>(codes + code_bytes);
    const float scale = load_first(factors + column, 1)[0];
    if (minima) return fma(splat(float(code)), splat(scale), load_first(factors + kPanelColumns + column, 1))[0];
    return scale * float(code - (wide ? Int8Codes::kOffset : Int4Codes::kOffset));
}

inline void unpack_rows(float* out, const octavo_matrix& m, int64_t panel_bytes, const int64_t* ids, int64_t begin,
                        int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const char* panel = static_cast<const char*>(m.data) + ids[i] / kPanelColumns * panel_bytes;
        const int column = int(ids[i] % kPanelColumns);
        for (int64_t k = 0; k < m.cols; ++k) out[i * m.cols + k] = unpacked(m, panel, column, k);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
