// The sparse index: keys of blocks, scores of blocks, and the selection of the best, ids ascending.
//
// Bytes: `block_scores` reads complete blocks x D x 4 (16.8 MB at 128K tokens in blocks of 4: 4.1 us at 4.1 TB/s), and
// nothing while every block is selected anyway. `select_blocks` reads a row's scores five times through one
// multiprocessor, integers only, so its result depends on no order.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

// The key of one block from its J raw keys: rope(rms_norm(mean over J rising, 1 + weight)). By one warp, D <= 256.
__device__ __forceinline__ void block_key(const float* raw, int members, const float* weight, float eps,
                                          const float* cosines, const float* sines, int width, int half, float* key) {
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
    for (int d = lane; d < width; d += 32) {
        float total = raw[d];
        for (int j = 1; j < members; ++j) total += raw[static_cast<long long>(j) * width + d];
        total /= static_cast<float>(members);
        key[d] = total;
        sum = fused(total, total, sum);
    }
    const float inverse = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(width) + eps);
    for (int d = lane; d < width; d += 32) key[d] = key[d] * inverse * (1.0f + weight[d]);
    __syncwarp();
    for (int d = lane; d < half; d += 32) {
        const float first = key[d], second = key[d + half];
        key[d] = fused(first, cosines[d], -(second * sines[d]));
        key[d + half] = fused(second, cosines[d], first * sines[d]);
    }
}

// Keys of B given blocks, a warp each.
extern "C" __global__ void index_block_keys(const float* raw, const float* weight, float eps, const float* cosines,
                                            const float* sines, int blocks, int members, int width, int half,
                                            float* keys) {
    device::wait_for_previous();
    const long long b = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (b < blocks)
        block_key(raw + b * members * width, members, weight, eps, cosines + b * half, sines + b * half, width, half,
                  keys + b * width);
}

// scores[t, b] = sum over heads rising of relu(q . key); NaN stays. A warp a block and row; order of a dot product: a
// lane's columns l, l + 32, ... rising, then the tree. Rows that see at most `top` blocks have none computed.
extern "C" __global__ void block_scores(Inputs inputs, const float* q, const float* keys, int rows, int heads, int width,
                                        int members, int top, int blocks, float* scores) {
    extern __shared__ float queries[];
    device::wait_for_previous();
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, start = *inputs.position;
    if (min((start + rows) / members, blocks) <= top) return;
    for (int i = threadIdx.x; i < rows * heads * width; i += blockDim.x) queries[i] = q[i];
    __syncthreads();
    const int most = min((start + rows) / members, blocks);
    for (int b = blockIdx.x * warps + (threadIdx.x >> 5); b < most; b += gridDim.x * warps) {
        float key[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            key[i] = i * 32 + lane < width ? keys[static_cast<long long>(b) * width + i * 32 + lane] : 0.0f;
        for (int t = 0; t < rows; ++t) {
            if (b >= (start + t + 1) / members) continue;
            float total = 0.0f;
            for (int h = 0; h < heads; ++h) {
                float dot = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (i * 32 < width)
                        dot = fused(i * 32 + lane < width ? queries[(t * heads + h) * width + i * 32 + lane] : 0.0f,
                                    key[i], dot);
                dot = warp_sum(dot);
                total += dot < 0.0f ? 0.0f : dot;
            }
            if (lane == 0) scores[static_cast<long long>(t) * blocks + b] = total;
        }
    }
}

constexpr int kSelectThreads = 1024, kSelectWarps = 32, kBins = 2048;

// Scores are at least 0 or NaN: their bits order like they do, NaN below all.
__device__ __forceinline__ unsigned score_key(float score) { return score != score ? 0u : __float_as_uint(score) + 1u; }

// Bits of the digit at `shift` of the rank-th largest key among those that agree with `prefix` above; rank becomes the
// rank among those of that digit. Digits are 11 bits.
__device__ unsigned select_digit(const float* scores, int n, int shift, unsigned prefix, unsigned* bins, int* chosen,
                                 int& rank) {
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) bins[i] = 0;
    __syncthreads();
    int zeros = 0;  // exact zeros are common (relu): counted apart, they would all meet in one bin
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
        const unsigned key = score_key(scores[i]);
        if (shift + 11 < 32 && key >> (shift + 11) != prefix) continue;
        if (key == 1u)
            ++zeros;
        else
            atomicAdd(&bins[key >> shift & (kBins - 1)], 1u);
    }
    for (int step = 16; step > 0; step >>= 1) zeros += __shfl_xor_sync(kAll, zeros, step);
    if (lane == 0 && zeros > 0) atomicAdd(&bins[1u >> shift], static_cast<unsigned>(zeros));
    __syncthreads();
    if (threadIdx.x < 32) {  // a lane sums 64 bins, highest first; then the lane that holds the rank looks through its own
        const int own = kBins / 32, high = kBins - 1 - lane * own;
        int sum = 0, before = 0;
        for (int i = 0; i < own; ++i) sum += static_cast<int>(bins[high - i]);
        int upto = sum;
        for (int step = 1; step < 32; step <<= 1) {
            const int other = __shfl_up_sync(kAll, upto, step);
            if (lane >= step) upto += other;
        }
        before = upto - sum;
        if (before <= rank && rank < upto) {
            int i = 0;
            while (before + static_cast<int>(bins[high - i]) <= rank) before += static_cast<int>(bins[high - i++]);
            chosen[0] = high - i;
            chosen[1] = rank - before;
        }
    }
    __syncthreads();
    rank = chosen[1];
    const unsigned digit = static_cast<unsigned>(chosen[0]);
    __syncthreads();
    return digit;
}

// Grid (T), 1024 threads. ids [T, top]: every complete block if there are at most `top`, else the best by (score
// descending, id ascending); ascending, padded with -1.
extern "C" __global__ void __launch_bounds__(1024) select_blocks(Inputs inputs, const float* scores, int members, int top,
                                                                 int blocks, int* ids) {
    __shared__ unsigned bins[kBins];
    __shared__ int above[kSelectWarps], equal[kSelectWarps], chosen[2];
    device::wait_for_previous();
    const int t = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int n = min((*inputs.position + t + 1) / members, blocks);
    ids += static_cast<long long>(t) * top;
    if (n <= top) {
        for (int i = threadIdx.x; i < top; i += kSelectThreads) ids[i] = i < n ? i : -1;
        return;
    }
    scores += static_cast<long long>(t) * blocks;
    int rank = top - 1;
    unsigned cut = select_digit(scores, n, 22, 0, bins, chosen, rank);
    cut = cut << 11 | select_digit(scores, n, 11, cut, bins, chosen, rank);
    cut = cut << 11 | select_digit(scores, n, 0, cut, bins, chosen, rank);
    const int ties = rank + 1;  // of the blocks whose key is the cut, the first so many are taken
    const int share = (n + kSelectWarps * 32 - 1) / (kSelectWarps * 32) * 32, first = warp * share;
    int larger = 0, same = 0;
    for (int i = first + lane; i < first + share; i += 32) {
        const unsigned key = i < n ? score_key(scores[i]) : 0u;
        larger += __popc(__ballot_sync(kAll, i < n && key > cut));
        same += __popc(__ballot_sync(kAll, i < n && key == cut));
    }
    if (lane == 0) above[warp] = larger, equal[warp] = same;
    __syncthreads();
    int taken = 0, seen = 0;  // ids before this warp's part: taken, and equal to the cut
    for (int w = 0; w < warp; ++w) {
        taken += above[w] + max(0, min(equal[w], ties - seen));
        seen += equal[w];
    }
    for (int i = first + lane; i < first + share; i += 32) {
        const unsigned key = i < n ? score_key(scores[i]) : 0u, below = (1u << lane) - 1u;
        const unsigned ties_here = __ballot_sync(kAll, i < n && key == cut);
        const bool is_taken = i < n && (key > cut || (key == cut && seen + __popc(ties_here & below) < ties));
        const unsigned all = __ballot_sync(kAll, is_taken);
        if (is_taken) ids[taken + __popc(all & below)] = i;
        taken += __popc(all);
        seen += __popc(ties_here);
    }
}
