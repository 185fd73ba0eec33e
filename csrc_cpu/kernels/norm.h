// rms_norm, fused_add_rms_norm, layer_norm. A row is reduced in an order that its length alone fixes.
#pragma once

#include "numeric.h"
#include "table.h"

namespace octavo {
namespace OCTAVO_ISA {

template <class T>
OCTAVO_INLINE float sum_of_squares(const T* x, int64_t size, float mean) {
    Floats sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
        for (int k = 0; k < 4; ++k) {
            const Floats d = load(x + i + k * kLanes) - mean;
            sums[k] = fma(d, d, sums[k]);
        }
    }
    for (; i + kLanes <= size; i += kLanes) {
        const Floats d = load(x + i) - mean;
        sums[0] = fma(d, d, sums[0]);
    }
    if (i < size) {
        T last[kLanes] = {};
        for (int64_t j = i; j < size; ++j) last[j - i] = x[j];
        const Floats d = load(last) - mean;
        float lanes[kLanes];
        store(lanes, d * d);
        for (int64_t j = size - i; j < kLanes; ++j) lanes[j] = 0.0f;
        sums[1] += load(lanes);
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
OCTAVO_INLINE float sum_of(const T* x, int64_t size) {
    Floats sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
        sums[0] += load(x + i);
        sums[1] += load(x + i + kLanes);
    }
    for (; i < size; i += kLanes) {
        sums[0] += size - i < kLanes ? load_first(x + i, size - i) : load(x + i);
    }
    return sum(sums[0] + sums[1]);
}

// y = (x - mean) * scale * (weight + offset) + bias
template <class T, class W>
OCTAVO_INLINE void scale_row(T* y, const T* x, const W* weight, const W* bias, int64_t size, float mean, float scale,
                             float offset) {
    for_each_vector(size, [&](int64_t i, auto get, auto put) OCTAVO_LAMBDA {
        Floats v = (get(x + i) - mean) * scale;
        if (weight) v = v * (get(weight + i) + offset);
        if (bias) v = v + get(bias + i);
        put(y + i, v);
    });
}

template <class T>
OCTAVO_INLINE const T* norm_input(const Norm& a, int64_t row) {
    return static_cast<const T*>(a.x) + row / a.inner_rows * a.outer_stride + row % a.inner_rows * a.inner_stride;
}

template <class T, class W>
void rms_norm_rows(const Norm& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* x = norm_input<T>(a, row);
        const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, a.hidden, 0.0f) / float(a.hidden) + a.eps);
        scale_row(static_cast<T*>(a.out) + row * a.hidden, x, static_cast<const W*>(a.weight),
                  static_cast<const W*>(nullptr), a.hidden, 0.0f, scale, a.weight_offset);
    }
}

template <class T, class W>
void fused_add_rms_norm_rows(const Norm& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        T* x = static_cast<T*>(a.out) + row * a.outer_stride;
        T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
        for_each_vector(a.hidden, [&](int64_t i, auto get, auto put)
                                      OCTAVO_LAMBDA { put(residual + i, get(x + i) + get(residual + i)); });
        // From the rounded sum, as the two ops one after another would.
        const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(residual, a.hidden, 0.0f) / float(a.hidden) + a.eps);
        scale_row(x, residual, static_cast<const W*>(a.weight), static_cast<const W*>(nullptr), a.hidden, 0.0f, scale,
                  a.weight_offset);
    }
}

template <class T, class W>
void layer_norm_rows(const Norm& a, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* x = norm_input<T>(a, row);
        const float mean = sum_of(x, a.hidden) / float(a.hidden);
        const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, a.hidden, mean) / float(a.hidden) + a.eps);
        scale_row(static_cast<T*>(a.out) + row * a.hidden, x, static_cast<const W*>(a.weight),
                  static_cast<const W*>(a.bias), a.hidden, mean, scale, a.weight_offset);
    }
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
