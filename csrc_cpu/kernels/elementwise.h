// rotary_embedding, activation, act_and_mul.
#pragma once

#include "numeric.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

template <class T>
OCTAVO_INLINE void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
    for_each_vector(half, [&](int64_t i, auto get, auto put) OCTAVO_LAMBDA {
        const Floats a = get(x + i), b = get(x + half + i), c = get(cos + i), s = get(sin + i);
        put(x + i, a * c - b * s);
        put(x + half + i, b * c + a * s);
    });
}

template <class T>
OCTAVO_INLINE void rotate_pairs(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = smaller<int64_t>(kLanes, half - i);
        T first[kLanes] = {}, second[kLanes] = {};
        for (int64_t j = 0; j < n; ++j) {
            first[j] = x[2 * (i + j)];
            second[j] = x[2 * (i + j) + 1];
        }
        const Floats a = load(first), b = load(second);
        const Floats c = load_first(cos + i, n), s = load_first(sin + i, n);
        store(first, a * c - b * s);
        store(second, b * c + a * s);
        for (int64_t j = 0; j < n; ++j) {
            x[2 * (i + j)] = first[j];
            x[2 * (i + j) + 1] = second[j];
        }
    }
}

template <class T>
void rotate_tokens(const Rotary& a, int64_t begin, int64_t end) {
    const int64_t half = a.rotary_dim / 2;
    for (int64_t token = begin; token < end; ++token) {
        const float* cos = a.cos_sin + a.positions[token] * a.rotary_dim;
        for (int which = 0; which < 2; ++which) {
            T* x = static_cast<T*>(a.tensors[which]) + token * a.token_stride[which];
            for (int64_t head = 0; head < a.num_heads[which]; ++head, x += a.head_stride[which]) {
                if (a.interleaved) {
                    rotate_pairs(x, cos, cos + half, half);
                } else {
                    rotate_halves(x, cos, cos + half, half);
                }
            }
        }
    }
}

template <int Kind>
OCTAVO_INLINE Floats activate(Floats x) {
    if constexpr (Kind == OCTAVO_SILU) {
        return x * sigmoid(x);
    } else if constexpr (Kind == OCTAVO_GELU) {
        return x * normal_cdf(x);
    } else if constexpr (Kind == OCTAVO_GELU_TANH) {
        // 0.5 (1 + tanh u) = sigmoid(2 u)
        return x * sigmoid(x * fma(x * x, splat(2 * 0.79788456f * 0.044715f), splat(2 * 0.79788456f)));
    } else {
        const Floats y = max(splat(0.0f), x);
        return Kind == OCTAVO_RELU2 ? y * y : y;
    }
}

template <int Kind>
OCTAVO_INLINE Floats gate(Floats x, Floats up) {
    if constexpr (Kind == OCTAVO_SWIGLU_CLAMPED) {  // gpt_oss: alpha 1.702, limit 7
        x = min(splat(7.0f), x);
        up = max(splat(-7.0f), min(splat(7.0f), up));
        return x * sigmoid(1.702f * x) * (up + 1.0f);
    } else {
        return activate<Kind>(x) * up;
    }
}

template <int Kind>
struct KindOf {
    static constexpr int kind = Kind;
};

// body(kind) as a constant, of an activation that needs no gate.
template <class Body>
OCTAVO_INLINE void with_activation(int activation, const Body& body) {
    switch (activation) {
        case OCTAVO_SILU: return body(KindOf<OCTAVO_SILU>());
        case OCTAVO_GELU: return body(KindOf<OCTAVO_GELU>());
        case OCTAVO_GELU_TANH: return body(KindOf<OCTAVO_GELU_TANH>());
        case OCTAVO_RELU: return body(KindOf<OCTAVO_RELU>());
        default: return body(KindOf<OCTAVO_RELU2>());
    }
}

template <class T, int Kind>
void activate_range(const Activate& a, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(a.x) + begin;
    T* out = static_cast<T*>(a.out) + begin;
    for_each_vector(end - begin,
                    [&](int64_t i, auto get, auto put) OCTAVO_LAMBDA { put(out + i, activate<Kind>(get(x + i))); });
}

template <class T, int Kind>
void gate_rows(const Activate& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        const T* up = x + a.width;
        T* out = static_cast<T*>(a.out) + row * a.width;
        for_each_vector(a.width, [&](int64_t i, auto get, auto put)
                                     OCTAVO_LAMBDA { put(out + i, gate<Kind>(get(x + i), get(up + i))); });
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
