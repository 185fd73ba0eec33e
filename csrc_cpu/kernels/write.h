// Writing to the cache. Tokens that share a lane may be written by two threads at once, so nothing but a token's own
// bytes is written.
#pragma once

#include "cache.h"

namespace octavo {
namespace OCTAVO_ISA {

// `size` elements of one token, the last vector padded with zeros: body(d, lanes [kLanes], how many of them count).
template <class A, class T, class Body>
OCTAVO_INLINE void for_each_lanes(const A* x, int64_t size, const Body& body) {
    for (int64_t d = 0; d < size; d += kLanes) {
        const int64_t n = smaller<int64_t>(kLanes, size - d);
        T lanes[kLanes];
        store(lanes, n == kLanes ? load(x + d) : load_first(x + d, n));
        body(d, lanes, n);
    }
}

// A token's key: lanes of P dims, block_size lanes apart.
template <int P, class T>
OCTAVO_INLINE void put_key(T* column, int64_t block_size, int64_t d, const T* lanes, int64_t n) {
    for (int64_t i = 0; i < n; i += P) std::memcpy(column + (d + i) * block_size, lanes + i, P * sizeof(T));
}

// A token's value: one element of each of n neighbouring lanes of P.
template <int P, class T>
OCTAVO_INLINE void put_value(T* row, int64_t d, const T* lanes, int64_t n) {
    for (int64_t i = 0; i < n; ++i) row[(d + i) * P] = lanes[i];
}

// Activation of dtype A to cache of dtype T, both floating.
template <class A, class T, int P>
void write_tokens(const WriteKv& a, int64_t begin, int64_t end) {
    const octavo_attention& g = *a.geometry;
    const int64_t stride = value_stride(g);
    for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = g.slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / g.block_size, offset = slot % g.block_size;
        T* head = static_cast<T*>(a.cache) + block * g.num_kv_heads * head_elements(g);
        const A* key = static_cast<const A*>(a.key) + token * a.key_token_stride;
        const A* value = static_cast<const A*>(a.value) + token * a.value_token_stride;
        for (int h = 0; h < g.num_kv_heads; ++h, head += head_elements(g), key += a.key_head_stride) {
            if (g.latent) {
                T* row = head + offset * stride;
                for_each_vector(g.head_size,
                                [&](int64_t d, auto get, auto put) OCTAVO_LAMBDA { put(row + d, get(key + d)); });
                continue;
            }
            T* column = head + offset * P;
            for_each_lanes<A, T>(key, g.head_size, [&](int64_t d, const T* lanes, int64_t n) OCTAVO_LAMBDA {
                put_key<P>(column, g.block_size, d, lanes, n);
            });
            T* row = head + key_elements(g) + (offset / P * stride) * P + offset % P;
            for_each_lanes<A, T>(value, g.value_size, [&](int64_t d, const T* lanes, int64_t n) OCTAVO_LAMBDA {
                put_value<P>(row, d, lanes, n);
            });
            value += a.value_head_stride;
        }
    }
}

// The scale that takes the largest of `size` elements to 127. NaN where one of them is.
template <class A>
OCTAVO_INLINE float scale_of(const A* x, int64_t size) {
    Words top = splat(0u);
    for_each_vector(size, [&](int64_t d, auto get, auto) OCTAVO_LAMBDA {
        const Words bits = (Words)get(x + d) & 0x7fffffffu;  // ordered as the numbers are, NaN above them
        top = bits > top ? bits : top;
    });
    uint32_t lanes[kLanes], largest = 0;
    std::memcpy(lanes, &top, sizeof top);
    for (int i = 0; i < kLanes; ++i) largest = larger(largest, lanes[i]);
    float size_of_largest;
    std::memcpy(&size_of_largest, &largest, sizeof largest);
    return size_of_largest / 127.0f;
}

// 0 where the reciprocal would overflow, and for NaN: codes are then 0, or whatever; the scale tells.
OCTAVO_INLINE float inverse_of(float scale) { return scale > 1e-37f ? 1.0f / scale : 0.0f; }

// The nearest integers to x * inverse, which is within 127 of 0 or not a number.
template <class A, class Body>
OCTAVO_INLINE void for_each_code(const A* x, int64_t size, float inverse, const Body& body) {
    for_each_lanes<A, float>(x, size, [&](int64_t d, const float* lanes, int64_t n) OCTAVO_LAMBDA {
        const Ints whole = (Ints)(load(lanes) * inverse + 0x1.8p23f) - 0x4b400000;
        int32_t wide[kLanes];
        Int8 codes[kLanes];
        std::memcpy(wide, &whole, sizeof whole);
        for (int i = 0; i < kLanes; ++i) codes[i].bits = int8_t(wide[i]);
        body(d, codes, n);
    });
}

template <class A>
void write_tokens_int8(const WriteKv& a, int64_t begin, int64_t end) {
    constexpr int P = 4;
    const octavo_attention& g = *a.geometry;
    for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = g.slots[token];
        if (slot < 0) continue;
        const int64_t block = slot / g.block_size, offset = slot % g.block_size;
        Int8* head = static_cast<Int8*>(a.cache) + block * g.num_kv_heads * head_elements(g);
        const A* key = static_cast<const A*>(a.key) + token * a.key_token_stride;
        const A* value = static_cast<const A*>(a.value) + token * a.value_token_stride;
        for (int h = 0; h < g.num_kv_heads; ++h, head += head_elements(g)) {
            const float key_scale = scale_of(key, g.head_size), value_scale = scale_of(value, g.value_size);
            for_each_code(key, g.head_size, inverse_of(key_scale),
                          [&](int64_t d, const Int8* codes, int64_t n) OCTAVO_LAMBDA {
                              put_key<P>(head + offset * P, g.block_size, d, codes, n);
                          });
            Int8* row = head + key_elements(g) + offset / P * value_stride(g) * P + offset % P;
            for_each_code(value, g.value_size, inverse_of(value_scale),
                          [&](int64_t d, const Int8* codes, int64_t n) OCTAVO_LAMBDA {
                              put_value<P>(row, d, codes, n);
                          });
            char* scales = reinterpret_cast<char*>(head + key_elements(g) + value_elements(g)) + offset * sizeof(float);
            std::memcpy(scales, &key_scale, sizeof(float));
            std::memcpy(scales + g.block_size * sizeof(float), &value_scale, sizeof(float));
            key += a.key_head_stride;
            value += a.value_head_stride;
        }
    }
}

template <class A>
void write_tokens_from(const WriteKv& a, int64_t begin, int64_t end) {
    switch (a.geometry->kv_dtype) {
        case OCTAVO_FLOAT32: return write_tokens<A, float, 1>(a, begin, end);
        case OCTAVO_BFLOAT16:
            return a.geometry->latent ? write_tokens<A, BFloat16, 1>(a, begin, end)
                                      : write_tokens<A, BFloat16, 2>(a, begin, end);
        case OCTAVO_FLOAT16: return write_tokens<A, Float16, 1>(a, begin, end);
        default: return write_tokens_int8<A>(a, begin, end);
    }
}

inline void write_kv(const WriteKv& a, int64_t begin, int64_t end) {
    switch (a.geometry->dtype) {
        case OCTAVO_FLOAT32: return write_tokens_from<float>(a, begin, end);
        case OCTAVO_BFLOAT16: return write_tokens_from<BFloat16>(a, begin, end);
        default: return write_tokens_from<Float16>(a, begin, end);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
