// Operands of a warp's products that lie in shared memory by rows, four at a time, and values rounded to BF16 in pairs.
#pragma once
#include "tensor.h"

namespace strata {
namespace pairs {

#if defined(STRATA_EMULATED)

__device__ __forceinline__ unsigned rounded(float low, float high) { return tensor::bf16_pair(low, high); }

__device__ __forceinline__ void load(const unsigned char* from, int pitch, unsigned* b) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    for (int m = 0; m < 4; ++m) b[m] = *reinterpret_cast<const unsigned*>(from + g * pitch + m * 16 + t * 4);
}

__device__ __forceinline__ void load_turned(const unsigned char* from, int pitch, unsigned* b) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    for (int m = 0; m < 4; ++m) {
        auto at = [&](int k) {
            return static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(from + (8 * m + k) * pitch + g * 2));
        };
        b[m] = at(2 * t) | at(2 * t + 1) << 16;
    }
}

#else

// Two floats to nearest even, the first in the low half.
__device__ __forceinline__ unsigned rounded(float low, float high) {
    unsigned result = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#endif
    return result;
}

// Operand B of 32 k by 8 columns, whose columns lie as 8 rows of `pitch` bytes: b0, b1 of the first 16 k, then of the rest.
__device__ __forceinline__ void load(const unsigned char* from, int pitch, unsigned* b) {
    b[0] = b[1] = b[2] = b[3] = 0;
#if __CUDA_ARCH__ >= 800
    const int lane = threadIdx.x & 31;
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(from + (lane & 7) * pitch + (lane >> 3) * 16));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(shared) : "memory");
#endif
}

// The same where the 32 k lie as rows, 8 columns of 16 bytes in each.
__device__ __forceinline__ void load_turned(const unsigned char* from, int pitch, unsigned* b) {
    b[0] = b[1] = b[2] = b[3] = 0;
#if __CUDA_ARCH__ >= 800
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(from + (threadIdx.x & 31) * pitch));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(shared) : "memory");
#endif
}

#endif

}  // namespace pairs
}  // namespace strata
