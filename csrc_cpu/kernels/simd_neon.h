// Advanced SIMD of AArch64, with products of int8 (DotProd, I8MM) and of bfloat16 (BF16) where they are.
#pragma once

#include <arm_neon.h>

#include "simd_generic.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE Floats splat(float x) { return (Floats)vdupq_n_f32(x); }
OCTAVO_INLINE Ints splat(int32_t x) { return (Ints)vdupq_n_s32(x); }
OCTAVO_INLINE Words splat(uint32_t x) { return (Words)vdupq_n_u32(x); }

OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
// No instruction has these ways with NaN.
OCTAVO_INLINE Floats max(Floats a, Floats b) { return generic::max(a, b); }
OCTAVO_INLINE Floats min(Floats a, Floats b) { return generic::min(a, b); }

OCTAVO_INLINE float sum(Floats x) {
    const float32x4_t y = (float32x4_t)x;
    return vaddv_f32(vadd_f32(vget_low_f32(y), vget_high_f32(y)));
}
OCTAVO_INLINE float maximum(Floats x) { return generic::maximum(x); }
OCTAVO_INLINE int32_t sum(Ints x) { return vaddvq_s32((int32x4_t)x); }
OCTAVO_INLINE int64_t sum(Longs x) { return generic::sum(x); }
OCTAVO_INLINE bool any_nan(Floats a, Floats b) { return generic::any_nan(a, b); }
OCTAVO_INLINE uint32_t lanes_where(Ints x) { return uint32_t(vaddvq_s32((int32x4_t)(x & Ints{1, 2, 4, 8}))); }

OCTAVO_INLINE Words widen(Shorts x) { return (Words)vmovl_u16((uint16x4_t)x); }
OCTAVO_INLINE Shorts narrow(Words x) { return (Shorts)vmovn_u32((uint32x4_t)x); }
OCTAVO_INLINE Floats to_floats(Ints x) { return (Floats)vcvtq_f32_s32((int32x4_t)x); }
OCTAVO_INLINE LongPair to_longs(Floats x) { return generic::to_longs(x); }
OCTAVO_INLINE void store_bytes(int8_t* p, Ints x) {
    const int16x4_t y = vmovn_s32((int32x4_t)x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(y, y));
    std::memcpy(p, &bytes, kLanes);
}
OCTAVO_INLINE int64_t store_from(float lowest, Floats x, int32_t first, float* values, int32_t* numbers) {
    return generic::store_from(lowest, x, first, values, numbers);
}
OCTAVO_INLINE Floats from_float16(Shorts x) { return (Floats)vcvt_f32_f16((float16x4_t)x); }
OCTAVO_INLINE Shorts to_float16(Floats x) { return (Shorts)vcvt_f16_f32((float32x4_t)x); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
OCTAVO_INLINE Shorts to_bfloat16(Floats x) { return (Shorts)vcvt_bf16_f32((float32x4_t)x); }
#else
OCTAVO_INLINE Shorts to_bfloat16(Floats x) { return generic::to_bfloat16(x); }
#endif
OCTAVO_INLINE Shorts to_bfloat16_input(Floats x) { return to_bfloat16(x); }

constexpr int kInputWords = 4;  // products take a lane of a vector
OCTAVO_INLINE Words load_inputs(const void* p) {
    uint32x4_t x = vld1q_u32(static_cast<const uint32_t*>(p));
    asm("" : "+w"(x));  // gcc would load lanes one by one, as integers
    return (Words)x;
}

template <int Place>
OCTAVO_INLINE Floats dot_floats(Floats sum, Words x, Words w) {
    return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)w, (float32x4_t)x, Place);
}

template <int Place>
OCTAVO_INLINE Floats dot_pairs(Floats sum, Words x, Words w) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // Rounds the sum of a pair's products by itself, to odd, and takes subnormal numbers as zero.
    return (Floats)vbfdotq_laneq_f32((float32x4_t)sum, (bfloat16x8_t)w, (bfloat16x8_t)x, Place);
#else
    sum = dot_floats<Place>(sum, x << 16, w << 16);
    return dot_floats<Place>(sum, x & 0xffff0000u, w & 0xffff0000u);
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedQuads = false;
template <int Place>
OCTAVO_INLINE Ints dot_quads(Ints sum, Words x, Words w) {
    return (Ints)vusdotq_laneq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)x, Place);
}
#else
constexpr bool kSignedQuads = true;
template <int Place>
OCTAVO_INLINE Ints dot_quads(Ints sum, Words x, Words w) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x, Place);
#else
    // Codes of x are within 127 of 0, so that two products fit in 16 bits.
    const int8x16_t a = (int8x16_t)vdupq_laneq_s32((int32x4_t)x, Place), b = (int8x16_t)w;
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return (Ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
