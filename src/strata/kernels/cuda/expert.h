// Weights of NVFP4 and Q8_0 experts as a warp takes them: a segment (two superblocks, 128 weights) of two groups of 16
// rows that are multiplied with the same activations, so 32 rows, 16 bytes a lane and load, all loads of a segment
// under way at once. Dot products are exact integers, so tensor cores may take them in any order; the FP32 sums over
// blocks are in the order that exact.h defines, one lane a row.
//
// lane = 16 * group + 4 * quad + q loads the words of rows 4 * quad .. + 3 of its group. An mma takes 16 rows and 32
// weights of each: k = 0 the first two rows of all quads, k = 1 the last two; lane q of a quad holds 8 neighbouring
// weights of them, those of block 2 i + q / 2, half q % 2 (i: which two blocks of the segment). Its 8 columns are 4
// pairs (block 2 i, block 2 i + 1), zero where a block is not the column's. Pair j is what lane q = j of a quad gets:
//   R = 1 row of activations     row j of its quad (pairs 0, 1 are zero for k = 1, pairs 2, 3 for k = 0)
//   R = 2                        rows 2 (j / 2), + 1 of its quad, activations j % 2
//   R = 4                        all 4 rows of its quad, activations j
#pragma once
#include "exact.h"
#include "device.h"

namespace strata {
namespace experts {

using namespace strata::exact;

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kZero = 0x4B400000;  // the bits of 1.5 * 2^23: an integer below 2^22 added to them is added to the float

#if defined(STRATA_EMULATED)

__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
    return strata_emulated_prmt(a, b, selector);
}

__device__ __forceinline__ unsigned load_word_once(const void* at) { return *static_cast<const unsigned*>(at); }
__device__ __forceinline__ uint4 load_now(const void* at) { return *static_cast<const uint4*>(at); }

// Operands of a warp's product, a line a thread.
static unsigned product_operands[1024][6];

__device__ __forceinline__ void multiply_s8(int* d, const int* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                            const int2& b) {
    const unsigned own[6] = {a0, a1, a2, a3, static_cast<unsigned>(b.x), static_cast<unsigned>(b.y)};
    for (int i = 0; i < 6; ++i) product_operands[threadIdx.x][i] = own[i];
    __syncwarp();
    const int lane = threadIdx.x & 31, warp = threadIdx.x - lane;
    int sums[4];
    for (int i = 0; i < 4; ++i) {
        const unsigned (*rows)[6] = product_operands + warp + (lane & ~3);
        const unsigned (*columns)[6] = product_operands + warp + (lane & 3) * 8 + (i & 1) * 4;
        sums[i] = c[i];
        for (int q = 0; q < 4; ++q)
            for (int half = 0; half < 2; ++half)
                sums[i] = __dp4a(static_cast<int>(rows[q][half * 2 + i / 2]), static_cast<int>(columns[q][4 + half]),
                                 sums[i]);
    }
    for (int i = 0; i < 4; ++i) d[i] = sums[i];
    __syncwarp();
}

#else

// A byte permute that takes all 4 bits of the selector's nibbles: the top one replicates the picked byte's sign.
__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

__device__ __forceinline__ unsigned load_word_once(const void* at) {
    unsigned v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// 16 bytes, read here and not where they are first needed.
__device__ __forceinline__ uint4 load_now(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// d = c + a b of signed bytes: a 16 x 32, b 32 x 8, as mma.m16n8k32 lays them out.
__device__ __forceinline__ void multiply_s8(int* d, const int* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                            const int2& b) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %11, %12, %13};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#else
    const unsigned a[4] = {a0, a1, a2, a3};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int x = c[half * 2], y = c[half * 2 + 1];
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(x), "+r"(y) : "r"(a[half]), "r"(b.x));
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(x), "+r"(y) : "r"(a[half + 2]), "r"(b.y));
        d[half * 2] = x, d[half * 2 + 1] = y;
    }
#endif
}

#endif

__device__ __forceinline__ unsigned word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The first of the lane's rows in its quad; it has R.
template <int R>
__device__ __forceinline__ int first_row(int q) { return R == 1 ? q : R == 2 ? q & 2 : 0; }

struct Nvfp4 {
    static constexpr int kBytes = 576;
    static constexpr int kAhead = 2;  // segments of a warp that are under way at once

    // The tables' first halves. `zero` is 0, which the compiler does not know: else it makes them again for each use.
    struct Tables {
        unsigned plus, minus;
        __device__ __forceinline__ explicit Tables(unsigned zero)
            : plus(0x04030200u ^ zero), minus(0xFDFEFF00u ^ zero) {}
    };

    struct Segment {
        uint4 codes[4];
        unsigned scales[2];  // of each superblock: block q, 4 rows
    };

    // `blocks`: of 16 weights from the segment's start to the row's end. Those behind are padding, whose scales become
    // zero, whatever its bytes are; the activations there are zero, so its codes may stay.
    static __device__ __forceinline__ void load(const unsigned char* from, int blocks, Segment& to) {
        const int q = threadIdx.x & 3, quad = threadIdx.x >> 2 & 3;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            if (s == 1 && blocks <= 4) break;
            const unsigned char* p = from + s * kBytes + quad * 16;
            to.codes[s * 2] = device::load_once(p + q * 64);
            to.codes[s * 2 + 1] = device::load_once(p + q * 64 + 256);
            to.scales[s] = s * 4 + q < blocks ? load_word_once(p + 512 - quad * 12 + q * 16) : 0;
        }
    }

    // Twice the E2M1 values as a sum of two tables' bytes. A code with its sign bit set picks a sign instead of a byte:
    // from `plus` 0, while `minus`, whose selector has the bit turned round, gives minus the magnitude. Without it
    // `plus` gives the magnitude + 1 (0 for 0), and `minus` the sign of a negative byte, -1 (0 for 0).
    static __device__ __forceinline__ void multiply(const Tables& tables, const Segment& segment, int i, int k,
                                                    const int2& x, const int* c, int* d) {
        const unsigned one = word_of(segment.codes[i], k * 2), other = word_of(segment.codes[i], k * 2 + 1);
        multiply_s8(d, c, plus(tables, one), plus(tables, other), plus(tables, one >> 16), plus(tables, other >> 16),
                    x);
        const unsigned turned = one ^ 0x88888888u, other_turned = other ^ 0x88888888u;
        multiply_s8(d, d, minus(tables, turned), minus(tables, other_turned), minus(tables, turned >> 16),
                    minus(tables, other_turned >> 16), x);
    }

    // Scales of the lane's rows for the 4 blocks of superblock s.
    template <int R>
    static __device__ __forceinline__ void take_scales(const Segment& segment, int s, float (*scales)[4]) {
        const int q = threadIdx.x & 3;
        // Lane q has block q of 4 rows; two exchanges give it row q of 4 blocks.
        unsigned word = segment.scales[s];
        word = permute(word, __shfl_xor_sync(kAll, word, 1), (q & 1) != 0 ? 0x3715u : 0x6240u);
        word = permute(word, __shfl_xor_sync(kAll, word, 2), (q & 2) != 0 ? 0x3276u : 0x5410u);
#pragma unroll
        for (int row = 0; row < R; ++row) {
            const unsigned own = R == 1 ? word : __shfl_sync(kAll, word, first_row<R>(q) + row, 4);
            // E4M3 * 2^-8 is the code shifted by 7 read as FP16 (exact.h: scaled_e4m3).
            const unsigned low = permute(own, 0, 0x4140u) << 7, high = permute(own, 0, 0x4342u) << 7;
            scales[row][0] = device::half_value(static_cast<unsigned short>(low & 0xFFFFu));
            scales[row][1] = device::half_value(static_cast<unsigned short>(low >> 16));
            scales[row][2] = device::half_value(static_cast<unsigned short>(high & 0xFFFFu));
            scales[row][3] = device::half_value(static_cast<unsigned short>(high >> 16));
        }
    }

    static __device__ __forceinline__ float unit(float tensor_scale) { return product(tensor_scale, kNvfp4Unit); }

  private:
    static __device__ __forceinline__ unsigned plus(const Tables& tables, unsigned codes) {
        return permute(tables.plus, 0x0D090705u, codes);
    }
    static __device__ __forceinline__ unsigned minus(const Tables& tables, unsigned codes) {
        return permute(tables.minus, 0xF4F8FAFCu, codes);
    }
};

struct Q8 {
    static constexpr int kBytes = 1088;
    static constexpr int kAhead = 1;

    struct Tables {
        __device__ __forceinline__ explicit Tables(unsigned) {}
    };

    struct Segment {
        uint4 codes[8];
        unsigned scales[2];  // of each superblock: 32 weights q / 2, rows 2 (q % 2), + 1 of the quad
    };

    static __device__ __forceinline__ void load(const unsigned char* from, int blocks, Segment& to) {
        const int q = threadIdx.x & 3, quad = threadIdx.x >> 2 & 3;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            if (s == 1 && blocks <= 4) break;
            const unsigned char* p = from + s * kBytes;
#pragma unroll
            for (int half = 0; half < 4; ++half)
                to.codes[s * 4 + half] =
                    device::load_once(p + (half / 2) * 512 + q * 128 + (half & 1) * 64 + quad * 16);
            const bool is_there = s * 4 + (q & 2) < blocks;
            to.scales[s] = is_there ? load_word_once(p + 1024 + (q / 2) * 32 + quad * 8 + (q & 1) * 4) : 0;
        }
    }

    static __device__ __forceinline__ void multiply(const Tables&, const Segment& segment, int i, int k, const int2& x,
                                                    const int* c, int* d) {
        const uint4 &first = segment.codes[i * 2], &second = segment.codes[i * 2 + 1];
        multiply_s8(d, c, word_of(first, k * 2), word_of(first, k * 2 + 1), word_of(second, k * 2),
                    word_of(second, k * 2 + 1), x);
    }

    template <int R>
    static __device__ __forceinline__ void take_scales(const Segment& segment, int s, float (*scales)[4]) {
        const int q = threadIdx.x & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int row = first_row<R>(q) + r;
                const unsigned pair = __shfl_sync(kAll, segment.scales[s], half * 2 + row / 2, 4);
                const unsigned bits = (row & 1) != 0 ? pair >> 16 : pair & 0xFFFFu;
                scales[r][half * 2] = device::half_value(static_cast<unsigned short>(bits));
                scales[r][half * 2 + 1] = scales[r][half * 2];
            }
    }

    static __device__ __forceinline__ float unit(float tensor_scale) { return tensor_scale; }
};

// What a lane reads of the activations: codes of the segment for each k, and the scales of its row of activations.
struct Activations {
    const signed char* codes[2];
    const float* scales;
};

// Adds the segment's blocks, in order, to the lane's R sums.
template <class Format, int R>
__device__ __forceinline__ void add_blocks(const typename Format::Tables& tables,
                                           const typename Format::Segment& segment, bool whole, const Activations& x,
                                           float* acc) {
    const int q = threadIdx.x & 3;
    const int zero[4] = {kZero, kZero, kZero, kZero};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        if (s == 1 && !whole) break;
        float scales[R][4];
        Format::template take_scales<R>(segment, s, scales);
        const float4 four = *reinterpret_cast<const float4*>(x.scales + s * 4);
        const float x_scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = s * 2 + half;
            int dots[2][4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int2 codes = *reinterpret_cast<const int2*>(x.codes[k] + i * 32);
                Format::multiply(tables, segment, i, k, codes, R == 4 || k == 0 ? zero : dots[0], dots[R == 4 ? k : 0]);
            }
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int block = 0; block < 2; ++block) {
                    const int bits = R == 1 ? (q & 1) != 0 ? dots[0][2 + block] : dots[0][block]
                                            : dots[r / 2][(r & 1) * 2 + block];
                    const float dot = sum(float_of(static_cast<unsigned>(bits)), -0x1.8p23f);
                    const int at = half * 2 + block;
                    acc[r] = fused(dot, product(scales[r][at], x_scales[at]), acc[r]);
                }
        }
    }
}

}  // namespace experts
}  // namespace strata
