// Row-wise kernels of small width: norms, rope, router, gates, the largest logit. Bytes are those
// of activations, a few hundred KiB at most: each takes a launch and little more, the largest logit reads T x V x 4.
#include "device.h"
#include "router.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

constexpr int kNormFours = 4;  // float4 of a thread of a wide row

__device__ __forceinline__ float4 plus_four(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// A wide row by a block, each value read once; weights do not wait for the launch before.
__device__ void norm_wide(const float4* x, const float4* more, float4* sum_out, const float4* weight, float eps, float plus,
                          int fours, float4* y, float* room) {
    float4 v[kNormFours], w[kNormFours];
    const int first = threadIdx.x, step = blockDim.x;
#pragma unroll
    for (int k = 0; k < kNormFours; ++k)
        if (first + k * step < fours) w[k] = weight[first + k * step];
    device::wait_for_previous();
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kNormFours; ++k)
        if (first + k * step < fours) {
            v[k] = x[first + k * step];
            if (more != nullptr) v[k] = plus_four(v[k], more[first + k * step]);
        }
#pragma unroll
    for (int k = 0; k < kNormFours; ++k)
        if (first + k * step < fours) {
            if (more != nullptr) sum_out[first + k * step] = v[k];
            sum = fused(v[k].w, v[k].w, fused(v[k].z, v[k].z, fused(v[k].y, v[k].y, fused(v[k].x, v[k].x, sum))));
        }
    const float inverse = inverse_root(block_sum(sum, room) / static_cast<float>(fours * 4) + eps);
#pragma unroll
    for (int k = 0; k < kNormFours; ++k)
        if (first + k * step < fours)
            y[first + k * step] = make_float4(v[k].x * inverse * (plus + w[k].x), v[k].y * inverse * (plus + w[k].y),
                                              v[k].z * inverse * (plus + w[k].z), v[k].w * inverse * (plus + w[k].w));
}

// x * rsqrt(mean(x^2) + eps) * (weight, or 1 + weight) of `count` rows. Up to 1024 columns a warp a row, else a block.
// With `more` (or null) the rows are x + more, which is written to `sum_out` as well.
extern "C" __global__ void rms_norm(const float* x, const float* more, float* sum_out, const float* weight, float eps,
                                    float plus, int count, int columns, int is_aligned, float* y) {
    __shared__ float room[32];
    device::let_next_start();
    const bool is_narrow = columns <= 1024;
    if (!is_narrow && is_aligned && columns % 4 == 0 && columns <= 4 * kNormFours * static_cast<int>(blockDim.x)) {
        const long long at = static_cast<long long>(blockIdx.x) * (columns / 4);
        norm_wide(reinterpret_cast<const float4*>(x) + at, more == nullptr ? nullptr : reinterpret_cast<const float4*>(more) + at,
                  reinterpret_cast<float4*>(sum_out) + at, reinterpret_cast<const float4*>(weight), eps, plus, columns / 4,
                  reinterpret_cast<float4*>(y) + at, room);
        return;
    }
    device::wait_for_previous();
    const int threads = is_narrow ? 32 : blockDim.x, first = is_narrow ? threadIdx.x & 31 : threadIdx.x;
    const long long row = is_narrow ? blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5) : blockIdx.x;
    const long long at = min(row, static_cast<long long>(count) - 1) * columns;
    float sum = 0.0f;
    for (int i = first; i < columns; i += threads) {
        const float value = more == nullptr ? x[at + i] : x[at + i] + more[at + i];
        if (more != nullptr && row < count) sum_out[at + i] = value;
        sum = fused(value, value, sum);
    }
    sum = is_narrow ? warp_sum(sum) : block_sum(sum, room);
    const float inverse = inverse_root(sum / static_cast<float>(columns) + eps);
    if (row < count)
        for (int i = first; i < columns; i += threads) {
            const float value = more == nullptr ? x[at + i] : x[at + i] + more[at + i];
            y[at + i] = value * inverse * (plus + weight[i]);
        }
}

// Column d of a head whose halves [0, half) and [half, 2 half) are rotated.
__device__ __forceinline__ float rotated(const float* head, int d, const float* cosines, const float* sines, int half) {
    if (d < half) return fused(head[d], cosines[d], -(head[d + half] * sines[d]));
    if (d < 2 * half) return fused(head[d], cosines[d - half], head[d - half] * sines[d - half]);
    return head[d];
}

// Rotates halves [0, half) and [half, 2 half) of each head of T x N x D; the rest is copied.
extern "C" __global__ void rope(const float* x, const float* cosines, const float* sines, int rows, int heads, int width,
                                int half, float* y) {
    device::wait_for_previous();
    const int total = rows * heads * width;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        const int d = i % width, t = i / (heads * width);
        y[i] = rotated(x + (i - d), d, cosines + t * half, sines + t * half, half);
    }
}

enum Pairwise { kSiluMul, kSigmoidMul, kAdd };

extern "C" __global__ void pairwise(const float* left, const float* right, int kind, int count, float* y) {
    device::wait_for_previous();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const float a = left[i], b = right[i];
        y[i] = kind == kAdd ? a + b : (kind == kSiluMul ? silu(a) : sigmoid(a)) * b;
    }
}

// y = base + sigmoid(gate[row]) * x; without a base (null) the product alone.
extern "C" __global__ void sigmoid_scale(const float* gate, const float* x, const float* base, int rows, int columns,
                                         float* y) {
    device::wait_for_previous();
    const int total = rows * columns;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        const float value = sigmoid(gate[i / columns]) * x[i];
        y[i] = base == nullptr ? value : base[i] + value;
    }
}

// Every stream starts as the embedding.
extern "C" __global__ void start_streams(const float* x, int rows, int streams, int columns, float* y) {
    device::wait_for_previous();
    const int total = rows * streams * columns;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x)
        y[i] = x[i / (streams * columns) * columns + i % columns];
}

// Grid (T), 32 threads.
extern "C" __global__ void router(const float* logits, int experts, int top_k, int renormalise, int* ids,
                                  float* weights) {
    device::wait_for_previous();
    const long long t = blockIdx.x;
    route_row<64 * 32>(logits + t * experts, experts, top_k, renormalise, ids + t * top_k, weights + t * top_k);
}

// A logit's place: order, then the lowest id. A NaN is above all.
__device__ __forceinline__ unsigned long long logit_key(float x, int id) {
    const unsigned order = x != x ? kAll : ordered(x);
    return static_cast<unsigned long long>(order) << 32 | (kAll - static_cast<unsigned>(id));
}

__device__ unsigned long long block_largest(unsigned long long best, unsigned long long* room) {
    for (int step = 16; step > 0; step >>= 1) {
        const unsigned long long other = __shfl_xor_sync(kAll, best, step);
        best = other > best ? other : best;
    }
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = best;
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(blockDim.x >> 5); ++warp) best = room[warp] > best ? room[warp] : best;
    return best;
}

// First launch: grid (parts, T), the largest key of each part. Second: grid (T).
extern "C" __global__ void argmax_parts(const float* logits, int columns, unsigned long long* parts) {
    __shared__ unsigned long long room[32];
    device::wait_for_previous();
    const float* row = logits + static_cast<long long>(blockIdx.y) * columns;
    unsigned long long best = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < columns; i += gridDim.x * blockDim.x) {
        const unsigned long long key = logit_key(row[i], i);
        best = key > best ? key : best;
    }
    best = block_largest(best, room);
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

extern "C" __global__ void argmax_rows(const unsigned long long* parts, int count, int* ids) {
    __shared__ unsigned long long room[32];
    device::wait_for_previous();
    unsigned long long best = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const unsigned long long key = parts[blockIdx.x * count + i];
        best = key > best ? key : best;
    }
    best = block_largest(best, room);
    if (threadIdx.x == 0)
        ids[blockIdx.x] = best >> 32 == kAll ? -1 : static_cast<int>(kAll - static_cast<unsigned>(best));
}
