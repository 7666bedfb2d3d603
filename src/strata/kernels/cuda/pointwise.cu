// Row-wise kernels of small width: norms, rope, router, gates, the largest logit. Bytes are those
// of activations, a few hundred KiB at most: each takes a launch and little more, the largest logit reads T x V x 4.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

// x * rsqrt(mean(x^2) + eps) * (weight, or 1 + weight) of `count` rows. Up to 1024 columns a warp a row, else a block.
// With `more` (or null) the rows are x + more, which is written to `sum_out` as well.
extern "C" __global__ void rms_norm(const float* x, const float* more, float* sum_out, const float* weight, float eps,
                                    float plus, int count, int columns, float* y) {
    __shared__ float room[32];
    device::wait_for_previous();
    const bool is_narrow = columns <= 1024;
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
    const float inverse = 1.0f / sqrtf(sum / static_cast<float>(columns) + eps);
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

// The top_k of E logits by (logit descending, id ascending), NaN last, and their softmax weights. A warp a row, kOwn
// logits a lane; lane l holds ids l, l + 32, ... Order of the softmax's sum: a lane's ids rising, then the warp's tree.
template <int kOwn>
__device__ void route(const float* logits, int experts, int top_k, int renormalise, int* ids, float* weights) {
    const int lane = threadIdx.x;
    float own[kOwn], largest = lowest();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        own[i] = i * 32 + lane < experts ? logits[i * 32 + lane] : lowest();
        largest = fmaxf(largest, own[i]);
    }
    for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (i * 32 + lane < experts) sum += expf(own[i] - largest);
    sum = warp_sum(sum);
    unsigned long long taken = 0;  // a bit for each own logit
    float chosen = 0.0f, total = 0.0f;
    for (int k = 0; k < top_k; ++k) {
        unsigned long long best = 0;  // order of the logit, then of the id from the highest down, so the lowest wins
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const unsigned id = i * 32 + lane;
            const unsigned long long key = static_cast<unsigned long long>(ordered(own[i])) << 32 | (kAll - id);
            if (id < static_cast<unsigned>(experts) && !(taken >> i & 1) && key > best) best = key;
        }
        for (int step = 16; step > 0; step >>= 1) {
            const unsigned long long other = __shfl_xor_sync(kAll, best, step);
            best = other > best ? other : best;
        }
        const int id = static_cast<int>(kAll - static_cast<unsigned>(best));
        if ((id & 31) == lane) taken |= 1ull << (id >> 5);
        const float weight = expf(logits[id] - largest) / sum;
        total += weight;
        if ((k & 31) == lane) {
            chosen = weight;
            ids[k] = id;
            weights[k] = weight;
        }
    }
    if (renormalise)
        for (int k = lane; k < top_k; k += 32) weights[k] = (top_k <= 32 ? chosen : weights[k]) / total;
}

// Grid (T), 32 threads.
extern "C" __global__ void router(const float* logits, int experts, int top_k, int renormalise, int* ids,
                                  float* weights) {
    device::wait_for_previous();
    const long long t = blockIdx.x;
    logits += t * experts, ids += t * top_k, weights += t * top_k;
    if (experts <= 4 * 32)
        route<4>(logits, experts, top_k, renormalise, ids, weights);
    else if (experts <= 16 * 32)
        route<16>(logits, experts, top_k, renormalise, ids, weights);
    else
        route<64>(logits, experts, top_k, renormalise, ids, weights);
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
