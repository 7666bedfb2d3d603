// The exact arithmetic of a routed expert, defined to the operation. One text for the CPU and for CUDA (compiled at
// run time: no includes, no toolkit). Whatever computes an expert in a decode round gives these bits.
//
// Numbers. FP32, round to nearest even, subnormals kept. Every operation below is one rounding; `fused` is a true
// fused multiply-add. Nothing is contracted or reassociated.
//
// An expert of one row x[H]:
//   1. quantise: groups of 16 neighbours get a scale a = largest / 127 and codes q = nearest(x * (127 / largest)),
//      ties to even, in [-127, 127]. A group whose largest magnitude is below 2^-100 is zero; one that holds a value
//      that is not finite is zero and flags the row. (BF16 experts: x stays FP32.)
//   2. gate and up: product of a matrix row with x, see below; then the tensor scale.
//   3. h = silu(gate) * up, FP32; quantised like x (its groups are those of 16 rows of gate and up).
//   4. down: product with h; then the tensor scale. A result that is not finite is written as 0 and flags the row.
// A product is cut into segments of 128 weights. A segment starts at +0 and takes its blocks in order:
//   NVFP4, Q8_0   acc = fused(float(dot), scale * a, acc), dot the integer dot product of 16 codes
//   BF16          acc = fused(weight, x, acc), weight by weight
// Segments are added to a total, from +0, in order. Widths are padded to 64: padding adds +0, whatever its bytes are.
// NVFP4 takes 2 x E2M1 as its integer and E4M3 * 2^-8 as its scale; the missing 2^7 is in the tensor scale.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define STRATA_EXACT __device__ __forceinline__
#else
#define STRATA_EXACT static inline __attribute__((always_inline))
#endif

namespace strata {
namespace exact {

constexpr int kGroup = 16;           // activations that share a scale, and output rows of a group
constexpr int kSuperblock = 64;      // weights of a row that lie together
constexpr int kSegment = 128;        // weights of a segment
constexpr float kNvfp4Unit = 128.0f; // 2^8 of the E4M3 scale, 2^-1 of the doubled E2M1 code
constexpr unsigned kSmallest = 0x0D800000u;  // 2^-100: a group with nothing larger is zero
constexpr unsigned kInfinity = 0x7F800000u;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
STRATA_EXACT float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
STRATA_EXACT float product(float a, float b) { return __fmul_rn(a, b); }
STRATA_EXACT float sum(float a, float b) { return __fadd_rn(a, b); }
STRATA_EXACT float quotient(float a, float b) { return __fdiv_rn(a, b); }
STRATA_EXACT unsigned bits_of(float x) { return __float_as_uint(x); }
STRATA_EXACT float float_of(unsigned bits) { return __uint_as_float(bits); }
#else
STRATA_EXACT float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
STRATA_EXACT float product(float a, float b) { return a * b; }
STRATA_EXACT float sum(float a, float b) { return a + b; }
STRATA_EXACT float quotient(float a, float b) { return a / b; }
STRATA_EXACT unsigned bits_of(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
STRATA_EXACT float float_of(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
#endif

// Magnitude bits: as an unsigned integer they order like magnitudes, with infinity and NaN on top.
STRATA_EXACT unsigned magnitude(float x) { return bits_of(x) & 0x7FFFFFFFu; }

STRATA_EXACT bool is_finite(float x) { return magnitude(x) < kInfinity; }

// 2 x the value of an E2M1 code: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
STRATA_EXACT int doubled_e2m1(unsigned code) {
    const int size = static_cast<int>((0xC8643210u >> (4 * (code & 7u))) & 15u);
    return (code & 8u) != 0 ? -size : size;
}

// value * 2^-8 of an E4M3 code in 0..0x7E, exactly: the code shifted by 7 read as FP16.
STRATA_EXACT float scaled_e4m3(unsigned code) {
    const float subnormal = product(static_cast<float>(static_cast<int>(code)), 0x1p-17f);
    return code >= 8u ? float_of((code << 20) + (112u << 23)) : subnormal;
}

// The value of FP16 bits (finite).
STRATA_EXACT float of_half(unsigned half) {
    const unsigned size = half & 0x7FFFu;
    const float subnormal = product(static_cast<float>(static_cast<int>(size)), 0x1p-24f);
    const float value = size >= 0x400u ? float_of((size << 13) + (112u << 23)) : subnormal;
    return (half & 0x8000u) != 0 ? -value : value;
}

STRATA_EXACT float of_bf16(unsigned bits) { return float_of(bits << 16); }

// The nearest integer, ties to even, of |x| < 2^22.
STRATA_EXACT int nearest(float x) { return static_cast<int>(bits_of(sum(x, 0x1.8p23f)) - 0x4B400000u); }

// What a group of 16 is multiplied by and what its codes stand for, from the largest magnitude's bits.
struct GroupScale {
    float inverse;  // codes are nearest(x * inverse)
    float scale;    // a
    bool finite;
};

STRATA_EXACT GroupScale group_scale(unsigned largest) {
    const bool finite = largest < kInfinity;
    const bool counts = finite && largest >= kSmallest;
    const float size = float_of(counts ? largest : 0x3F800000u);
    GroupScale group;
    group.inverse = counts ? quotient(127.0f, size) : 0.0f;
    group.scale = counts ? quotient(size, 127.0f) : 0.0f;
    group.finite = finite;
    return group;
}

// e^x by 2^n * p(r), |r| <= ln 2 / 2, p the Taylor polynomial of degree 7 (relative error below 1e-8 before
// rounding). x is clamped to [-87, 88]; NaN stays NaN.
STRATA_EXACT float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = fused(x, 0x1.715476p+0f, 0x1.8p23f);
    const float n = sum(shifted, -0x1.8p23f);
    float r = fused(n, -0x1.62e4p-1f, x);
    r = fused(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.a01a02p-13f;            // 1 / 7!
    p = fused(p, r, 0x1.6c16c2p-10f);     // 1 / 6!
    p = fused(p, r, 0x1.111112p-7f);      // 1 / 5!
    p = fused(p, r, 0x1.555556p-5f);      // 1 / 4!
    p = fused(p, r, 0x1.555556p-3f);      // 1 / 3!
    p = fused(p, r, 0.5f);
    p = fused(p, r, 1.0f);
    p = fused(p, r, 1.0f);
    return product(p, float_of((bits_of(shifted) - 0x4B400000u + 127u) << 23));
}

STRATA_EXACT float silu(float x) { return quotient(x, sum(1.0f, exponential(-x))); }

}  // namespace exact
}  // namespace strata
