// BF16 products of a warp and asynchronous copies to shared memory (sm_80 and newer), and both for the tests' emulation.
#pragma once
#include "device.h"

namespace strata {
namespace tensor {

// An mma of m16n8k16: lane = 4 g + t. A (16 rows, 16 k): a0 row g, k 2 t and + 1; a1 row g + 8; a2, a3 the same for
// k + 8. B (16 k, 8 columns): b0 column g, k 2 t and + 1; b1 the same for k + 8. D: d0, d1 row g, columns 2 t and + 1;
// d2, d3 row g + 8.
#if defined(STRATA_EMULATED)

static unsigned operands[1024][6];

__device__ __forceinline__ double bf16_product(unsigned a, unsigned b) {
    return static_cast<double>(device::bf16_low(a)) * device::bf16_low(b) +
           static_cast<double>(device::bf16_high(a)) * device::bf16_high(b);
}

__device__ __forceinline__ void multiply(float* d, const unsigned* a, unsigned b0, unsigned b1) {
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    for (int i = 0; i < 6; ++i) operands[threadIdx.x][i] = own[i];
    __syncwarp();
    const int lane = threadIdx.x & 31, warp = threadIdx.x - lane;
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        const unsigned (*rows)[6] = operands + warp + (lane & ~3);
        const unsigned (*columns)[6] = operands + warp + ((lane & 3) * 2 + (i & 1)) * 4;
        double sum = d[i];
        for (int t = 0; t < 4; ++t)
            sum += bf16_product(rows[t][i / 2], columns[t][4]) + bf16_product(rows[t][2 + i / 2], columns[t][5]);
        sums[i] = static_cast<float>(sum);
    }
    __syncwarp();
    for (int i = 0; i < 4; ++i) d[i] = sums[i];
}

// Both halves times the scale's, exact where the product has no more bits than BF16.
__device__ __forceinline__ unsigned scaled(unsigned pair, unsigned scale) {
    const float low = device::bf16_low(pair) * device::bf16_low(scale);
    const float high = device::bf16_high(pair) * device::bf16_high(scale);
    return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
}

__device__ __forceinline__ void copy_async(void* to, const void* from, bool whole) {
    *static_cast<uint4*>(to) = whole ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void commit_copies() {}
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {}

__device__ __forceinline__ void load_turned(const unsigned char* from, int pitch, unsigned& b0, unsigned& b1) {
    const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
    auto at = [&](int k) { return static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(from + k * pitch + g * 2)); };
    b0 = at(2 * t) | at(2 * t + 1) << 16;
    b1 = at(2 * t + 8) | at(2 * t + 9) << 16;
}

#else

__device__ __forceinline__ void multiply(float* d, const unsigned* a, unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

__device__ __forceinline__ unsigned scaled(unsigned pair, unsigned scale) {
    unsigned result = 0;
#if __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(scale), "r"(0x80008000u));
#endif
    return result;
}

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool whole) {
#if __CUDA_ARCH__ >= 800
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = whole ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(shared), "l"(from), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
// Until at most kLeft of the committed groups are under way.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
#endif
}

// Operand B of 16 k by 8 columns that lie in shared memory as 16 rows of `pitch` bytes, a multiple of 16.
__device__ __forceinline__ void load_turned(const unsigned char* from, int pitch, unsigned& b0, unsigned& b1) {
    b0 = b1 = 0;
#if __CUDA_ARCH__ >= 800
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(from + (threadIdx.x & 15) * pitch));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b0), "=r"(b1) : "r"(shared) : "memory");
#endif
}

#endif

// BF16 bits of a float, round to nearest even; NaN stays one.
__device__ __forceinline__ unsigned bf16_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

__device__ __forceinline__ unsigned bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

}  // namespace tensor
}  // namespace strata
