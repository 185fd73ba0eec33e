// Elementary functions on vectors of floats, to about one unit in the last place. NaN stays NaN.
#pragma once

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

// e^x; 0 below -87.3, where the result would be subnormal, and e^88 from there on.
OCTAVO_INLINE Floats exp(Floats x) {
    const float lowest = -87.3365f, magic = 0x1.8p23f;
    const Floats c = min(splat(88.0f), max(splat(lowest), x));
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const Floats shifted = fma(c, splat(1.44269504f), splat(magic));
    const Ints n = (Ints)shifted - 0x4b400000;
    const Floats whole = shifted - magic;
    Floats f = fma(whole, splat(-0x1.62e4p-1f), c);  // ln 2 in two parts: whole * the first is exact
    f = fma(whole, splat(-1.42860677e-6f), f);
    Floats p = splat(1.0f / 720);
    p = fma(p, f, splat(1.0f / 120));
    p = fma(p, f, splat(1.0f / 24));
    p = fma(p, f, splat(1.0f / 6));
    p = fma(p, f, splat(0.5f));
    p = fma(p, f, splat(1.0f));
    p = fma(p, f, splat(1.0f));
    const Floats y = p * (Floats)((n + 127) << 23);
    return x < lowest ? splat(0.0f) : y;
}

OCTAVO_INLINE float exp(float x) { return exp(splat(x))[0]; }

OCTAVO_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

OCTAVO_INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

OCTAVO_INLINE Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// The share of a normal distribution below x: erfc by the Chebyshev fit of Numerical Recipes (erfcc), whose
// relative error is below 1.2e-7 everywhere.
OCTAVO_INLINE Floats normal_cdf(Floats x) {
    const Floats z = absolute(x) * 0.70710678f;
    const Floats t = 1.0f / fma(z, splat(0.5f), splat(1.0f));
    Floats p = splat(0.17087277f);
    p = fma(p, t, splat(-0.82215223f));
    p = fma(p, t, splat(1.48851587f));
    p = fma(p, t, splat(-1.13520398f));
    p = fma(p, t, splat(0.27886807f));
    p = fma(p, t, splat(-0.18628806f));
    p = fma(p, t, splat(0.09678418f));
    p = fma(p, t, splat(0.37409196f));
    p = fma(p, t, splat(1.00002368f));
    p = fma(p, t, splat(-1.26551223f));
    const Floats tail = 0.5f * t * exp(fma(-z, z, p));
    return x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
