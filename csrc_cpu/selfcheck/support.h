// What the checks stand on: the library's functions, tensors with guards, and the count of failures.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../include/octavo_cpu.h"

inline void* library = nullptr;
inline int num_failures = 0;
inline long num_checks = 0;

template <class F>
F* function(const char* name) {
    void* address = dlsym(library, name);
    if (address == nullptr) {
        std::fprintf(stderr, "the library has no %s\n", name);
        std::exit(2);
    }
    return reinterpret_cast<F*>(address);
}
#define CALL(name) function<decltype(name)>(#name)

inline void fail(const std::string& subject, const std::string& complaint) {
    if (++num_failures > 20) return;
    std::fprintf(stderr, "FAILED %s, %s: %s\n", CALL(octavo_isa)(), subject.c_str(), complaint.c_str());
}
inline void check(bool ok, const std::string& subject, const char* complaint) {
    ++num_checks;
    if (!ok) fail(subject, complaint);
}

// ---- dtypes

inline float bfloat16_to_float(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}
inline float decode_float16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(float(fraction), -24)
                                       : std::ldexp(float(fraction + 1024), exponent - 25);
    return bits >> 15 ? -size : size;
}
inline float float16_to_float(uint16_t bits) {
    static const std::vector<float> all = [] {
        std::vector<float> values;
        for (int i = 0; i < 65536; ++i) values.push_back(decode_float16(uint16_t(i)));
        return values;
    }();
    return all[bits];
}
// The nearest of the values that a 16-bit dtype has, to even where two are: by search, as the slow truth.
inline uint16_t nearest(float x, float (*widen)(uint16_t), uint16_t infinity) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    x = std::fabs(x);
    uint16_t low = 0, high = infinity;
    while (high - low > 1) {
        const uint16_t middle = uint16_t((low + high) / 2);
        (widen(middle) <= x ? low : high) = middle;
    }
    const double below = x - double(widen(low)), above = double(widen(high)) - x;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}
inline uint16_t float_to_bfloat16(float x) { return nearest(x, bfloat16_to_float, 0x7f80); }
inline uint16_t float_to_float16(float x) { return nearest(x, float16_to_float, 0x7c00); }

inline int64_t item_bytes(int dtype) { return dtype == OCTAVO_FLOAT32 ? 4 : dtype == OCTAVO_INT8 ? 1 : 2; }
inline double epsilon(int dtype) {
    return dtype == OCTAVO_FLOAT32 ? 1.2e-7 : dtype == OCTAVO_BFLOAT16 ? 7.9e-3 : 9.8e-4;
}

// A tensor with a guard before and behind it, and bytes that are NaN in every dtype wherever nothing was put.
class Buffer {
public:
    Buffer(int dtype, int64_t size) : dtype(dtype), bytes_(size_t((size + 2 * kGuard) * item_bytes(dtype)), 0xff) {}

    void* data() { return bytes_.data() + kGuard * item_bytes(dtype); }
    double get(int64_t i) const {
        const unsigned char* p = bytes_.data() + (i + kGuard) * item_bytes(dtype);
        float x;
        uint16_t half;
        if (dtype == OCTAVO_FLOAT32) {
            std::memcpy(&x, p, 4);
            return x;
        }
        std::memcpy(&half, p, 2);
        return dtype == OCTAVO_BFLOAT16 ? bfloat16_to_float(half) : float16_to_float(half);
    }
    void put(int64_t i, float x) {
        unsigned char* p = bytes_.data() + (i + kGuard) * item_bytes(dtype);
        const uint16_t half = dtype == OCTAVO_BFLOAT16 ? float_to_bfloat16(x) : float_to_float16(x);
        std::memcpy(p, dtype == OCTAVO_FLOAT32 ? static_cast<void*>(&x) : const_cast<uint16_t*>(&half),
                    size_t(item_bytes(dtype)));
    }
    void copy(int64_t at, const Buffer& from, int64_t from_at, int64_t count) {
        const int64_t size = item_bytes(dtype);
        std::memcpy(bytes_.data() + (at + kGuard) * size, from.bytes_.data() + (from_at + kGuard) * size,
                    size_t(count * size));
    }
    bool untouched(int64_t i) const {
        const unsigned char* p = bytes_.data() + (i + kGuard) * item_bytes(dtype);
        return std::all_of(p, p + item_bytes(dtype), [](unsigned char byte) { return byte == 0xff; });
    }
    bool guarded() const {
        const int64_t size = int64_t(bytes_.size()) / item_bytes(dtype) - 2 * kGuard;
        for (int64_t i = 0; i < kGuard; ++i) {
            if (!untouched(-1 - i) || !untouched(size + i)) return false;
        }
        return true;
    }
    bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }

    int dtype;

private:
    static constexpr int64_t kGuard = 64;
    std::vector<unsigned char> bytes_;
};

inline double square(double x) { return x * x; }

inline std::mt19937 generator(7);
inline float normal() { return std::normal_distribution<float>()(generator); }

constexpr int kGap = 5;  // elements between rows

inline Buffer random_rows(int dtype, int64_t rows, int64_t width, float scale = 1.0f) {
    Buffer x(dtype, rows * (width + kGap));
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < width; ++i) x.put(r * (width + kGap) + i, scale * normal());
    }
    return x;
}

// Within one rounding of the dtype, float32's errors at `scale`, and `more`. `part` names which output of the subject
// it is.
inline void check_close(const Buffer& got, int64_t at, double want, double scale, const std::string& subject,
                        const char* part, double more = 0) {
    ++num_checks;
    const double error = std::fabs(got.get(at) - want);
    if (error <= 1.01 * epsilon(got.dtype) * std::fabs(want) + 4e-6 * scale + more) return;
    fail(subject, std::string(part) + " element " + std::to_string(at) + " is " + std::to_string(got.get(at)) +
                      ", not " + std::to_string(want));
}
