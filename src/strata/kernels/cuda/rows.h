// What the row kernels share: sums in a fixed order, gates, the law of row invariance.
//
// Row t of every result is the same bits whatever the number of rows and whatever the other rows hold. So no order of
// summation depends on the number of rows, on the grid or on timing: a sum runs over a thread's own elements in rising
// order, then through one tree of its warp, then over warps in rising order; how elements are dealt to threads is a
// function of the width alone. Compiled without contraction and fast math; fused multiply-adds are written as such.
#pragma once
#include "device.h"

namespace strata {
namespace rows {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMaxWindow = 8;  // program.py's MAX_WINDOW

// What a round reads from device memory (RoundInputs): where the window starts, and rows to fold.
struct Inputs {
    const int *ids, *position, *accepted;
};

__device__ __forceinline__ float lowest() { return __uint_as_float(0xFF800000u); }  // -inf

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

__device__ __forceinline__ float sigmoid(float x) { return device::quotient(1.0f, 1.0f + device::exponential(-x)); }

__device__ __forceinline__ float silu(float x) { return device::quotient(x, 1.0f + device::exponential(-x)); }

__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

// The same bits in every lane: addition commutes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAll, x, step);
    return x;
}

// The sum over `lanes` neighbouring lanes, a power of two.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step >>= 1) x += __shfl_xor_sync(kAll, x, step);
    return x;
}

// The sum over a block of whole warps, in every thread. `room` holds a float a warp; free again after a barrier.
__device__ __forceinline__ float block_sum(float x, float* room) {
    x = warp_sum(x);
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
    __syncthreads();
    const int warps = blockDim.x >> 5;
    float total = room[0];
#pragma unroll
    for (int warp = 1; warp < 16; ++warp)  // read at once, added in order
        if (warp < warps) total += room[warp];
    for (int warp = 16; warp < warps; ++warp) total += room[warp];
    return total;
}

// The largest of a warp's words, in every lane.
__device__ __forceinline__ unsigned warp_largest(unsigned x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kAll, x);
#else
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const unsigned other = __shfl_xor_sync(kAll, x, step);
        x = other > x ? other : x;
    }
    return x;
#endif
}

// Bits that order like the floats, zeros of both signs alike; NaN of any sign is lowest.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = x == 0.0f ? 0u : __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0u;
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The float of such bits; NaN where there was one.
__device__ __forceinline__ float unordered(unsigned bits) {
    if (bits == 0u) return __uint_as_float(0x7FC00000u);
    return __uint_as_float((bits & 0x80000000u) != 0 ? bits ^ 0x80000000u : ~bits);
}

}  // namespace rows
}  // namespace strata
