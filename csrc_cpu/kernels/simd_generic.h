// Vectors of the compiler's own types, what every instruction set's header defines for them, and how that is done
// where there is no instruction for it.
#pragma once

#include <cstdint>
#include <cstring>

#define OCTAVO_INLINE inline __attribute__((always_inline))
#define OCTAVO_LAMBDA __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef int64_t Longs __attribute__((vector_size(kLanes * 4)));  // half as many lanes
struct LongPair {
    Longs low, high;
};

template <class A>
OCTAVO_INLINE A smaller(A a, A b) {
    return a < b ? a : b;
}
template <class A>
OCTAVO_INLINE A larger(A a, A b) {
    return a > b ? a : b;
}

template <int N>
struct Number {
    static constexpr int value = N;
};

// body(number) for numbers 0 to N - 1, as constants.
template <int N, class Body>
OCTAVO_INLINE void for_each_number(const Body& body) {
    if constexpr (N > 1) for_each_number<N - 1>(body);
    body(Number<N - 1>());
}

// ---- what an instruction set's header defines

OCTAVO_INLINE Floats splat(float x);
OCTAVO_INLINE Ints splat(int32_t x);
OCTAVO_INLINE Words splat(uint32_t x);

// a * b + c, rounded once where the instruction set can.
OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c);
// The larger and the smaller by lane; b where either is NaN.
OCTAVO_INLINE Floats max(Floats a, Floats b);
OCTAVO_INLINE Floats min(Floats a, Floats b);

// Over the lanes; of floats by halves, so that the order depends on the width alone.
OCTAVO_INLINE float sum(Floats x);
OCTAVO_INLINE float maximum(Floats x);
OCTAVO_INLINE int32_t sum(Ints x);
OCTAVO_INLINE int64_t sum(Longs x);
// Whether any lane of either is NaN.
OCTAVO_INLINE bool any_nan(Floats a, Floats b);
// A bit for each lane of a comparison's result that is true.
OCTAVO_INLINE uint32_t lanes_where(Ints x);

OCTAVO_INLINE Words widen(Shorts x);
OCTAVO_INLINE Shorts narrow(Words x);
OCTAVO_INLINE Floats to_floats(Ints x);
OCTAVO_INLINE LongPair to_longs(Floats x);  // the nearest, to even; of 0 up to 2^51
OCTAVO_INLINE void store_bytes(int8_t* p, Ints x);  // the low byte of each lane
// Lanes that are not below `lowest` side by side, with `first` and how many lanes each stands behind it; how many they
// are. May write a whole vector.
OCTAVO_INLINE int64_t store_from(float lowest, Floats x, int32_t first, float* values, int32_t* numbers);
OCTAVO_INLINE Floats from_float16(Shorts x);
OCTAVO_INLINE Shorts to_float16(Floats x);
OCTAVO_INLINE Shorts to_bfloat16(Floats x);
OCTAVO_INLINE Shorts to_bfloat16_input(Floats x);  // of products, which may take subnormal numbers as zero

// Inputs of products: the next kInputWords words of a row, of which a product takes the Place-th for all its lanes.
OCTAVO_INLINE Words load_inputs(const void* p);
// sum + products of lanes that are floats.
template <int Place>
OCTAVO_INLINE Floats dot_floats(Floats sum, Words x, Words w);
// sum + products of lanes that are two bfloat16, the first in the low bits.
template <int Place>
OCTAVO_INLINE Floats dot_pairs(Floats sum, Words x, Words w);
// sum + products of lanes that are four signed codes of x, and four of w: signed where kSignedQuads, else unsigned.
template <int Place>
OCTAVO_INLINE Ints dot_quads(Ints sum, Words x, Words w);

// ---- without an instruction; OCTAVO_ISA:: is the instruction set's own

namespace generic {

OCTAVO_INLINE Ints splat(int32_t x) { return Ints{} + x; }
OCTAVO_INLINE Words splat(uint32_t x) { return Words{} + x; }
OCTAVO_INLINE Floats splat(float x) { return Floats{x, x, x, x}; }  // a sum would keep the sign of zero

OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
OCTAVO_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
OCTAVO_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }

template <class How>
OCTAVO_INLINE float fold(Floats x, const How& how) {
    float lanes[kLanes];
    std::memcpy(lanes, &x, sizeof x);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] = how(lanes[i], lanes[i + half]);
    }
    return lanes[0];
}
OCTAVO_INLINE float sum(Floats x) {
    return fold(x, [](float a, float b) OCTAVO_LAMBDA { return a + b; });
}
OCTAVO_INLINE float maximum(Floats x) {
    return fold(x, [](float a, float b) OCTAVO_LAMBDA { return larger(a, b); });
}
OCTAVO_INLINE int32_t sum(Ints x) {
    int32_t lanes[kLanes], total = 0;
    std::memcpy(lanes, &x, sizeof x);
    for (int i = 0; i < kLanes; ++i) total += lanes[i];
    return total;
}
OCTAVO_INLINE int64_t sum(Longs x) {
    int64_t total = 0;
    for (int i = 0; i < kLanes / 2; ++i) total += x[i];
    return total;
}
OCTAVO_INLINE bool any_nan(Floats a, Floats b) { return OCTAVO_ISA::lanes_where((a != a) | (b != b)) != 0; }
OCTAVO_INLINE uint32_t lanes_where(Ints x) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] & 1) << i;
    return bits;
}

OCTAVO_INLINE Words widen(Shorts x) { return __builtin_convertvector(x, Words); }
OCTAVO_INLINE Shorts narrow(Words x) { return __builtin_convertvector(x, Shorts); }
OCTAVO_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
OCTAVO_INLINE LongPair to_longs(Floats x) {
    typedef float Half __attribute__((vector_size(kLanes * 2)));
    typedef double Doubles __attribute__((vector_size(kLanes * 4)));
    Half halves[2];
    std::memcpy(halves, &x, sizeof x);
    // Adding 1.5 * 2^52 leaves the nearest integer in the low bits.
    const Doubles low = __builtin_convertvector(halves[0], Doubles) + 0x1.8p52;
    const Doubles high = __builtin_convertvector(halves[1], Doubles) + 0x1.8p52;
    const int64_t magic = 0x4338000000000000;
    return {(Longs)low - magic, (Longs)high - magic};
}
OCTAVO_INLINE int64_t store_from(float lowest, Floats x, int32_t first, float* values, int32_t* numbers) {
    uint32_t found = OCTAVO_ISA::lanes_where(x >= lowest);
    int64_t count = 0;
    if (!found) return count;
    float lanes[kLanes];
    std::memcpy(lanes, &x, sizeof x);
    for (; found; found &= found - 1, ++count) {
        const int lane = __builtin_ctz(found);
        values[count] = lanes[lane];
        numbers[count] = first + lane;
    }
    return count;
}
OCTAVO_INLINE void store_bytes(int8_t* p, Ints x) {
    for (int i = 0; i < kLanes; ++i) p[i] = int8_t(x[i]);
}

OCTAVO_INLINE Floats from_float16(Shorts bits) {
    const Words half = OCTAVO_ISA::widen(bits);
    // The exponent moves by 112, which the product does exactly, subnormals included.
    Words x = (Words)((Floats)((half & 0x7fffu) << 13) * 0x1p112f);
    x = (half & 0x7fffu) >= 0x7c00u ? (x | 0x7f800000u) : x;
    return (Floats)(x | (half & 0x8000u) << 16);
}
OCTAVO_INLINE Shorts to_float16(Floats x) {
    const Words sign = (Words)x & 0x80000000u, size = (Words)x & 0x7fffffffu;
    const Words normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    // Below 2^-14 the sum with 0.5 leaves the rounded subnormal in its low bits.
    const Words small = (Words)((Floats)size + 0.5f) - 0x3f000000u;
    Words bits = size < 0x38800000u ? small : normal;
    bits = size >= 0x477ff000u ? OCTAVO_ISA::splat(0x7c00u) : bits;
    bits = size > 0x7f800000u ? OCTAVO_ISA::splat(0x7e00u) : bits;
    return OCTAVO_ISA::narrow(bits | sign >> 16);
}
OCTAVO_INLINE Shorts to_bfloat16(Floats x) {
    const Words bits = (Words)x;
    Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    rounded = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded;
    return OCTAVO_ISA::narrow(rounded);
}

// One word in every lane.
OCTAVO_INLINE Words load_inputs(const void* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return OCTAVO_ISA::splat(word);
}
OCTAVO_INLINE Floats dot_floats(Floats sum, Words x, Words w) {
    return OCTAVO_ISA::fma((Floats)x, (Floats)w, sum);
}
OCTAVO_INLINE Floats dot_pairs(Floats sum, Words x, Words w) {
    sum = OCTAVO_ISA::fma((Floats)(x << 16), (Floats)(w << 16), sum);
    return OCTAVO_ISA::fma((Floats)(x & 0xffff0000u), (Floats)(w & 0xffff0000u), sum);
}
OCTAVO_INLINE Ints dot_quads(Ints sum, Words x, Words w) {
    for (int i = 0; i < 4; ++i) sum += (Ints)(w >> (8 * i) & 255u) * ((Ints)(x << (24 - 8 * i)) >> 24);
    return sum;
}

}  // namespace generic
}  // namespace OCTAVO_ISA
}  // namespace octavo
