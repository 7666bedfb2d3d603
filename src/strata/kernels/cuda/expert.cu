// Routed experts on an NVIDIA GPU in the exact arithmetic: the same bits as the CPU's kernels, from the same blobs,
// wherever an address points (a slot in VRAM or the alias of page-locked RAM). Compiled at run time by NVRTC, with
// exact.h as its only header. No fast math; no contraction (--fmad=false), fused multiply-adds are explicit.
//
// A warp computes one segment of 128 weights for the 16 rows of a group: lane = 16 * step + row, so that each load of
// the warp is 128 neighbouring bytes. Segments of a group are the warps of a block and are added in order.
// Up to 4 rows of activations share one reading of the weights.
#include "exact.h"

using namespace strata::exact;

struct Task {  // as in csrc/cpu/expert.cpp
    unsigned long long blob;
    float scales[3];
    int first, count, unused;
};

struct Shape {
    int hidden, intermediate;
    int wide, narrow;  // superblocks of a row of gate and up, of down
};

constexpr int kRows = 4;
constexpr unsigned kAll = 0xFFFFFFFFu;

__device__ __forceinline__ int dot4(int a, int b, int c) { return __dp4a(a, b, c); }

// Eight E2M1 codes of a 32-bit word as 2 x 4 signed bytes, in the order of the weights.
__device__ __forceinline__ void decode_e2m1(unsigned word, int& first, int& second) {
    const unsigned index = word & 0x77777777u, shifted = word << 4;
    // Byte permutes: the magnitude, its negative, and 0xFF where the code's sign bit is set.
    const unsigned low = __byte_perm(0x03020100u, 0x0C080604u, index);
    const unsigned high = __byte_perm(0x03020100u, 0x0C080604u, index >> 16);
    const unsigned minus_low = __byte_perm(0xFDFEFF00u, 0xF4F8FAFCu, index);
    const unsigned minus_high = __byte_perm(0xFDFEFF00u, 0xF4F8FAFCu, index >> 16);
    unsigned sign_low, sign_high;
    asm("prmt.b32 %0, %1, %2, 0xD9C8;" : "=r"(sign_low) : "r"(shifted), "r"(word));
    asm("prmt.b32 %0, %1, %2, 0xFBEA;" : "=r"(sign_high) : "r"(shifted), "r"(word));
    first = static_cast<int>((low & ~sign_low) | (minus_low & sign_low));
    second = static_cast<int>((high & ~sign_high) | (minus_high & sign_high));
}

struct Nvfp4 {
    static constexpr int kBytes = 576;

    // The segment's sum of this lane's row for R rows of activations.
    template <int R>
    static __device__ __forceinline__ void segment(const unsigned char* group, int superblocks, int segment,
                                                   const signed char* const* codes, const float* const* scales,
                                                   int lane, float* acc) {
        const int step = lane >> 4, row = lane & 15;
        for (int s = segment * 2; s < segment * 2 + 2 && s < superblocks; ++s) {
            const unsigned char* p = group + static_cast<long long>(s) * kBytes;
            unsigned words[4], e4m3[4];
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                words[block] = *reinterpret_cast<const unsigned*>(p + block * 128 + lane * 4);
                e4m3[block] = p[512 + block * 16 + row];
            }
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                int first, second;
                decode_e2m1(words[block], first, second);
                const float scale = scaled_e4m3(e4m3[block]);
                const int at = s * 4 + block;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const int2 x = *reinterpret_cast<const int2*>(codes[r] + at * 16 + step * 8);
                    int dot = dot4(second, x.y, dot4(first, x.x, 0));
                    dot += __shfl_xor_sync(kAll, dot, 16);
                    acc[r] = fused(static_cast<float>(dot), product(scale, scales[r][at]), acc[r]);
                }
            }
        }
    }

    static __device__ __forceinline__ float unit(float tensor_scale) { return product(tensor_scale, kNvfp4Unit); }
};

struct Q8 {
    static constexpr int kBytes = 1088;

    template <int R>
    static __device__ __forceinline__ void segment(const unsigned char* group, int superblocks, int segment,
                                                   const signed char* const* codes, const float* const* scales,
                                                   int lane, float* acc) {
        const int step = lane >> 4, row = lane & 15;
        for (int s = segment * 2; s < segment * 2 + 2 && s < superblocks; ++s) {
            const unsigned char* p = group + static_cast<long long>(s) * kBytes;
#pragma unroll
            for (int block = 0; block < 4; ++block) {
                const int first = *reinterpret_cast<const int*>(p + block * 256 + lane * 4);
                const int second = *reinterpret_cast<const int*>(p + block * 256 + 128 + lane * 4);
                const float scale =
                    of_half(*reinterpret_cast<const unsigned short*>(p + 1024 + (block / 2) * 32 + row * 2));
                const int at = s * 4 + block;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const signed char* x = codes[r] + at * 16 + step * 4;
                    int dot = dot4(first, *reinterpret_cast<const int*>(x), 0);
                    dot = dot4(second, *reinterpret_cast<const int*>(x + 8), dot);
                    dot += __shfl_xor_sync(kAll, dot, 16);
                    acc[r] = fused(static_cast<float>(dot), product(scale, scales[r][at]), acc[r]);
                }
            }
        }
    }

    static __device__ __forceinline__ float unit(float tensor_scale) { return tensor_scale; }
};

// Sums of one group for R rows into sums[r][row] (shared memory), by all warps of the block, in order of segments.
template <class Format, int R>
__device__ void multiply(const unsigned char* group, int superblocks, const signed char* const* codes,
                         const float* const* scales, float unit, float* partial, float* sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int segments = (superblocks + 1) / 2;
    for (int segment = warp; segment < segments; segment += warps) {
        float acc[R];
        for (int r = 0; r < R; ++r) acc[r] = 0.0f;
        Format::template segment<R>(group, superblocks, segment, codes, scales, lane, acc);
        if (lane < 16)
            for (int r = 0; r < R; ++r) partial[(segment * kRows + r) * 16 + lane] = acc[r];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * 16; i += blockDim.x) {
        float total = 0.0f;
        for (int segment = 0; segment < segments; ++segment) total = sum(total, partial[segment * kRows * 16 + i]);
        sums[i] = product(total, unit);
    }
    __syncthreads();
}

// Codes and scale of 16 values held by 16 neighbouring lanes. Returns whether all are finite.
__device__ __forceinline__ bool quantise_lanes(float x, unsigned lanes, signed char* code, float* scale, bool write) {
    unsigned largest = magnitude(x);
    for (int step = 8; step > 0; step >>= 1) {
        const unsigned other = __shfl_xor_sync(lanes, largest, step);
        largest = other > largest ? other : largest;
    }
    const GroupScale group = group_scale(largest);
    if (write) {
        *code = static_cast<signed char>(group.scale != 0.0f ? nearest(product(x, group.inverse)) : 0);
        *scale = group.scale;
    }
    return group.finite;
}

// Rows of x [T, hidden] to codes [T, padded] and scales [T, padded / 16], padded a multiple of 64. One block a row.
extern "C" __global__ void quantise_rows(const float* x, int hidden, int padded, signed char* codes, float* scales,
                                         unsigned char* flags) {
    const long long row = blockIdx.x;
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {  // blockDim is a multiple of 32, padded of 64
        const float value = i < hidden ? x[row * hidden + i] : 0.0f;
        if (!quantise_lanes(value, kAll, codes + row * padded + i, scales + (row * padded + i) / 16, true))
            flags[row] = 1;
    }
}

struct Picks {
    const signed char* codes[kRows];
    const float* scales[kRows];
};

template <class Format, int R>
__device__ void gate_up_rows(const Shape& shape, const Task& task, int first, const int* rows, const signed char* x,
                             const float* x_scales, signed char* inner, float* inner_scales, unsigned char* flags,
                             float* partial, float* gates, float* ups) {
    Picks picks;
    for (int r = 0; r < R; ++r) {
        const long long row = rows[task.first + first + r];
        picks.codes[r] = x + row * shape.wide * 64;
        picks.scales[r] = x_scales + row * shape.wide * 4;
    }
    const long long bytes = static_cast<long long>(shape.wide) * Format::kBytes;
    const auto* gate = reinterpret_cast<const unsigned char*>(task.blob) + blockIdx.x * 2 * bytes;
    multiply<Format, R>(gate, shape.wide, picks.codes, picks.scales, Format::unit(task.scales[0]), partial, gates);
    multiply<Format, R>(gate + bytes, shape.wide, picks.codes, picks.scales, Format::unit(task.scales[1]), partial, ups);
    const int i = threadIdx.x, r = i >> 4;
    if (i < (R * 16 + 31) / 32 * 32) {
        const float h = r < R ? product(silu(gates[i]), ups[i]) : 0.0f;
        const long long pick = task.first + first + r;
        signed char* code = inner + pick * shape.narrow * 64 + blockIdx.x * 16 + (i & 15);
        float* scale = inner_scales + pick * shape.narrow * 4 + blockIdx.x;
        if (!quantise_lanes(h, kAll, code, scale, r < R)) flags[rows[r < R ? pick : task.first]] = 1;
    }
    __syncthreads();
}

template <class Format, int R>
__device__ void down_rows(const Shape& shape, const Task& task, int first, const int* rows, const int* slots,
                          const signed char* inner, const float* inner_scales, float* out, unsigned char* flags,
                          float* partial, float* sums) {
    Picks picks;
    for (int r = 0; r < R; ++r) {
        const long long pick = task.first + first + r;
        picks.codes[r] = inner + pick * shape.narrow * 64;
        picks.scales[r] = inner_scales + pick * shape.narrow * 4;
    }
    const long long wide = static_cast<long long>(shape.wide) * Format::kBytes;
    const long long narrow = static_cast<long long>(shape.narrow) * Format::kBytes;
    const auto* weights = reinterpret_cast<const unsigned char*>(task.blob) +
                          2 * ((shape.intermediate + 15) / 16) * wide + blockIdx.x * narrow;
    multiply<Format, R>(weights, shape.narrow, picks.codes, picks.scales, Format::unit(task.scales[2]), partial, sums);
    for (int i = threadIdx.x; i < R * 16; i += blockDim.x) {
        const int column = blockIdx.x * 16 + (i & 15);
        const int pick = task.first + first + (i >> 4);
        if (column >= shape.hidden) continue;
        const bool finite = is_finite(sums[i]);
        out[static_cast<long long>(slots[pick]) * shape.hidden + column] = finite ? sums[i] : 0.0f;
        if (!finite) flags[rows[pick]] = 1;
    }
    __syncthreads();
}

// Grid (groups of 16 rows, tasks). Shared memory: segments x 4 x 16 floats. `inner` and `inner_scales` are zero where
// the intermediate width is padded (the caller clears them once).
// `num_tasks`, if not null, holds how many of the grid's tasks there are.
#define STRATA_EXPERT_KERNELS(NAME, FORMAT)                                                                          \
    extern "C" __global__ void NAME##_gate_up(Shape shape, const Task* tasks, const int* rows, const signed char* x, \
                                              const float* x_scales, signed char* inner, float* inner_scales,        \
                                              unsigned char* flags, const int* num_tasks) {                          \
        if (num_tasks != nullptr && static_cast<int>(blockIdx.y) >= *num_tasks) return;                              \
        extern __shared__ float partial[];                                                                           \
        __shared__ float gates[kRows * 16], ups[kRows * 16];                                                         \
        const Task task = tasks[blockIdx.y];                                                                         \
        for (int first = 0; first < task.count; first += kRows) {                                                    \
            if (task.count - first == 1)                                                                             \
                gate_up_rows<FORMAT, 1>(shape, task, first, rows, x, x_scales, inner, inner_scales, flags, partial,  \
                                        gates, ups);                                                                 \
            else if (task.count - first == 2)                                                                        \
                gate_up_rows<FORMAT, 2>(shape, task, first, rows, x, x_scales, inner, inner_scales, flags, partial,  \
                                        gates, ups);                                                                 \
            else if (task.count - first == 3)                                                                        \
                gate_up_rows<FORMAT, 3>(shape, task, first, rows, x, x_scales, inner, inner_scales, flags, partial,  \
                                        gates, ups);                                                                 \
            else                                                                                                     \
                gate_up_rows<FORMAT, 4>(shape, task, first, rows, x, x_scales, inner, inner_scales, flags, partial,  \
                                        gates, ups);                                                                 \
        }                                                                                                            \
    }                                                                                                                \
    extern "C" __global__ void NAME##_down(Shape shape, const Task* tasks, const int* rows, const int* slots,        \
                                           const signed char* inner, const float* inner_scales, float* out,          \
                                           unsigned char* flags, const int* num_tasks) {                             \
        if (num_tasks != nullptr && static_cast<int>(blockIdx.y) >= *num_tasks) return;                              \
        extern __shared__ float partial[];                                                                           \
        __shared__ float sums[kRows * 16];                                                                           \
        const Task task = tasks[blockIdx.y];                                                                         \
        for (int first = 0; first < task.count; first += kRows) {                                                    \
            if (task.count - first == 1)                                                                             \
                down_rows<FORMAT, 1>(shape, task, first, rows, slots, inner, inner_scales, out, flags, partial,      \
                                     sums);                                                                          \
            else if (task.count - first == 2)                                                                        \
                down_rows<FORMAT, 2>(shape, task, first, rows, slots, inner, inner_scales, out, flags, partial,      \
                                     sums);                                                                          \
            else if (task.count - first == 3)                                                                        \
                down_rows<FORMAT, 3>(shape, task, first, rows, slots, inner, inner_scales, out, flags, partial,      \
                                     sums);                                                                          \
            else                                                                                                     \
                down_rows<FORMAT, 4>(shape, task, first, rows, slots, inner, inner_scales, out, flags, partial,      \
                                     sums);                                                                          \
        }                                                                                                            \
    }

STRATA_EXPERT_KERNELS(nvfp4, Nvfp4)
STRATA_EXPERT_KERNELS(q8_0, Q8)

// BF16 experts: activations stay FP32 and every weight is one fused multiply-add, in order. A half of a warp computes a
// segment, lane = 16 * (segment & 1) + row. `width`: what x has; weights are padded with zeros behind it.
template <int R>
__device__ void multiply_bf16(const unsigned char* group, int superblocks, const float* const* x, int width, float unit,
                              float* partial, float* sums) {
    constexpr int kBytes = 2048;
    const int lane = threadIdx.x & 31, row = lane & 15, warps = blockDim.x >> 5;
    const int segments = (superblocks + 1) / 2;
    for (int segment = (threadIdx.x >> 5) * 2 + (lane >> 4); segment < segments; segment += warps * 2) {
        float acc[R];
        for (int r = 0; r < R; ++r) acc[r] = 0.0f;
        for (int s = segment * 2; s < segment * 2 + 2 && s < superblocks; ++s) {
            const unsigned char* p = group + static_cast<long long>(s) * kBytes + row * 4;
#pragma unroll 8
            for (int pair = 0; pair < 32; ++pair) {
                const unsigned word = *reinterpret_cast<const unsigned*>(p + pair * 64);
                const float low = float_of(word << 16), high = float_of(word & 0xFFFF0000u);
                const int at = s * kSuperblock + pair * 2;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    acc[r] = fused(low, at < width ? x[r][at] : 0.0f, acc[r]);
                    acc[r] = fused(high, at + 1 < width ? x[r][at + 1] : 0.0f, acc[r]);
                }
            }
        }
        for (int r = 0; r < R; ++r) partial[(segment * kRows + r) * 16 + row] = acc[r];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < R * 16; i += blockDim.x) {
        float total = 0.0f;
        for (int segment = 0; segment < segments; ++segment) total = sum(total, partial[segment * kRows * 16 + i]);
        sums[i] = product(total, unit);
    }
    __syncthreads();
}

template <int R>
__device__ void gate_up_rows_bf16(const Shape& shape, const Task& task, int first, const int* rows, const float* x,
                                  float* inner, unsigned char* flags, float* partial, float* gates, float* ups) {
    const float* picked[R];
    for (int r = 0; r < R; ++r) picked[r] = x + static_cast<long long>(rows[task.first + first + r]) * shape.hidden;
    const long long bytes = static_cast<long long>(shape.wide) * 2048;
    const auto* gate = reinterpret_cast<const unsigned char*>(task.blob) + blockIdx.x * 2 * bytes;
    multiply_bf16<R>(gate, shape.wide, picked, shape.hidden, task.scales[0], partial, gates);
    multiply_bf16<R>(gate + bytes, shape.wide, picked, shape.hidden, task.scales[1], partial, ups);
    for (int i = threadIdx.x; i < R * 16; i += blockDim.x) {
        const int column = blockIdx.x * 16 + (i & 15);
        const long long pick = task.first + first + (i >> 4);
        const float h = product(silu(gates[i]), ups[i]);
        inner[pick * shape.narrow * kSuperblock + column] = h;  // rows of inner are padded to whole groups and more
        if (!is_finite(h)) flags[rows[pick]] = 1;
    }
    __syncthreads();
}

template <int R>
__device__ void down_rows_bf16(const Shape& shape, const Task& task, int first, const int* rows, const int* slots,
                               const float* inner, float* out, unsigned char* flags, float* partial, float* sums) {
    const float* picked[R];
    for (int r = 0; r < R; ++r)
        picked[r] = inner + static_cast<long long>(task.first + first + r) * shape.narrow * kSuperblock;
    const long long wide = static_cast<long long>(shape.wide) * 2048, narrow = static_cast<long long>(shape.narrow) * 2048;
    const auto* weights = reinterpret_cast<const unsigned char*>(task.blob) +
                          2 * ((shape.intermediate + 15) / 16) * wide + blockIdx.x * narrow;
    multiply_bf16<R>(weights, shape.narrow, picked, shape.narrow * kSuperblock, task.scales[2], partial, sums);
    for (int i = threadIdx.x; i < R * 16; i += blockDim.x) {
        const int column = blockIdx.x * 16 + (i & 15);
        const int pick = task.first + first + (i >> 4);
        if (column >= shape.hidden) continue;
        const bool finite = is_finite(sums[i]);
        out[static_cast<long long>(slots[pick]) * shape.hidden + column] = finite ? sums[i] : 0.0f;
        if (!finite) flags[rows[pick]] = 1;
    }
    __syncthreads();
}

// As the kernels above. `x` FP32 [rows, hidden], `inner` FP32 [picks, narrow * 64], zero where the width is padded.
extern "C" __global__ void bf16_gate_up(Shape shape, const Task* tasks, const int* rows, const float* x, float* inner,
                                        unsigned char* flags, const int* num_tasks) {
    if (num_tasks != nullptr && static_cast<int>(blockIdx.y) >= *num_tasks) return;
    extern __shared__ float partial[];
    __shared__ float gates[kRows * 16], ups[kRows * 16];
    const Task task = tasks[blockIdx.y];
    int first = 0;
    for (; first + kRows <= task.count; first += kRows)
        gate_up_rows_bf16<kRows>(shape, task, first, rows, x, inner, flags, partial, gates, ups);
    for (; first < task.count; ++first)
        gate_up_rows_bf16<1>(shape, task, first, rows, x, inner, flags, partial, gates, ups);
}

extern "C" __global__ void bf16_down(Shape shape, const Task* tasks, const int* rows, const int* slots,
                                     const float* inner, float* out, unsigned char* flags, const int* num_tasks) {
    if (num_tasks != nullptr && static_cast<int>(blockIdx.y) >= *num_tasks) return;
    extern __shared__ float partial[];
    __shared__ float sums[kRows * 16];
    const Task task = tasks[blockIdx.y];
    int first = 0;
    for (; first + kRows <= task.count; first += kRows)
        down_rows_bf16<kRows>(shape, task, first, rows, slots, inner, out, flags, partial, sums);
    for (; first < task.count; ++first)
        down_rows_bf16<1>(shape, task, first, rows, slots, inner, out, flags, partial, sums);
}

// y[row] = sum over k, in order, by fused multiply-add from zero, of weights[row, k] * parts[row, k]. Grid (rows, blocks).
extern "C" __global__ void combine_parts(const float* parts, const float* weights, int k, int hidden, float* y,
                                         unsigned char* flags) {
    const long long row = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    float total = 0.0f;
    for (int part = 0; part < k; ++part)
        total = fused(weights[row * k + part], parts[(row * k + part) * hidden + i], total);
    const bool finite = is_finite(total);
    y[row * hidden + i] = finite ? total : 0.0f;
    if (!finite) flags[row] = 1;
}
