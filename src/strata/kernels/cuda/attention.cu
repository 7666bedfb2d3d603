// Attention of a window's rows over a cache (FP32 or BF16), dense or over selected blocks, in two launches.
//
// A row's positions form a list: all of them, or those of its blocks and then of the incomplete tail. The list is cut
// every 256 entries; `attend` gives each cut's maximum, sum and weighted values, `attend_combine` joins them. A cut of
// a list that holds every position has the same positions in the same order as the dense one, so it has the same bits.
// Bytes: listed positions x 2 x G x D x (4 or 2). Blocks of other query heads read the same keys through the cache.
//
// Orders: a score is the sum over 8 lanes, each over its 8 columns in every 64, by a tree; a cut's sum runs over a
// lane's entries rising, then a tree; values over the 32 entries of a warp rising, then over warps rising; cuts are
// dealt to 8 warps in turn, summed rising, then over warps rising.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

constexpr int kCut = 256;        // entries of a list
constexpr int kWarps = 8;
constexpr int kHeads = 4;        // query heads of a block, of one key/value head
constexpr int kPerWarp = kCut / kWarps;
constexpr int kWidest = 256;

struct Shape {
    const float* q;         // T x N x D
    const void *k, *v;      // P x G x D
    const int* blocks;      // T x M ids, ascending, then -1; null: every position
    float *sums, *values;   // T x N x cuts x 2, T x N x cuts x D
    int* counts;            // T: entries of each row's list
    int is_bf16, heads, kv_heads, width, listed, block, positions, cuts;
    float scale;
    int unused;
};

// Eight columns of a row of the cache from column d on; zeros past the width.
__device__ __forceinline__ void load_eight(const void* cache, bool is_bf16, long long row, int width, int d, float* out) {
    const long long at = row * width + d;
    if (width % 8 == 0) {
        if (d >= width) {
#pragma unroll
            for (int i = 0; i < 8; ++i) out[i] = 0.0f;
        } else if (is_bf16) {
            const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(cache) + at);
            out[0] = device::bf16_low(raw.x), out[1] = device::bf16_high(raw.x);
            out[2] = device::bf16_low(raw.y), out[3] = device::bf16_high(raw.y);
            out[4] = device::bf16_low(raw.z), out[5] = device::bf16_high(raw.z);
            out[6] = device::bf16_low(raw.w), out[7] = device::bf16_high(raw.w);
        } else {
            const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(cache) + at);
            const float4 low = from[0], high = from[1];
            out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
            out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
        }
        return;
    }
    for (int i = 0; i < 8; ++i) {
        out[i] = 0.0f;
        if (d + i < width)
            out[i] = is_bf16 ? device::bf16_low(static_cast<const unsigned short*>(cache)[at + i])
                             : static_cast<const float*>(cache)[at + i];
    }
}

// How many blocks a row lists; by all threads.
__device__ int count_listed(const Shape& s, const int* list) {
    int count = 0;
    for (int first = 0; first < s.listed; first += blockDim.x) {
        const int i = first + threadIdx.x;
        count += __syncthreads_count(i < s.listed && list[i] >= 0);
    }
    return count;
}

// Position of entry i of a row's list of `count` blocks (dense: the entry itself).
__device__ __forceinline__ int position_of(const Shape& s, const int* list, int count, int complete, int i) {
    if (list == nullptr) return i;
    const int of_blocks = count * s.block;
    return i < of_blocks ? list[i / s.block] * s.block + i % s.block : complete * s.block + i - of_blocks;
}

// Dot products of kHeads queries with the cut's keys: warp w, its four groups of 8 lanes, take keys 4 w + group, +32 ...
__device__ __forceinline__ void score_cut(const Shape& s, const float* q, const int* positions, int entries, int g,
                                          float* scores) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sub = lane & 7, first = warp * 4 + (lane >> 3);
    float acc[kPerWarp / 4][kHeads];
#pragma unroll
    for (int j = 0; j < kPerWarp / 4; ++j)
#pragma unroll
        for (int h = 0; h < kHeads; ++h) acc[j][h] = 0.0f;
    for (int d = sub * 8; d < (s.width + 63) / 64 * 64; d += 64) {
        float query[kHeads][8];
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int i = 0; i < 8; ++i) query[h][i] = q[h * kWidest + d + i];
#pragma unroll
        for (int j = 0; j < kPerWarp / 4; ++j) {
            const int entry = first + j * 32;
            if (entry >= entries) continue;
            float key[8];
            load_eight(s.k, s.is_bf16, static_cast<long long>(positions[entry]) * s.kv_heads + g, s.width, d, key);
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
#pragma unroll
                for (int i = 0; i < 8; ++i) acc[j][h] = fused(query[h][i], key[i], acc[j][h]);
        }
    }
#pragma unroll
    for (int j = 0; j < kPerWarp / 4; ++j)
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const float total = lanes_sum<8>(acc[j][h]);
            if (sub == 0) scores[h * kCut + first + j * 32] = total * s.scale;
        }
}

// Scores of head `warp` to weights exp(score - maximum); (maximum, sum) to `sums`.
__device__ __forceinline__ void soften_cut(float* scores, int entries, float* sums) {
    const int lane = threadIdx.x & 31;
    float largest = lowest(), sum = 0.0f;
    for (int i = lane; i < entries; i += 32) largest = fmaxf(largest, scores[i]);
    for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    for (int i = lane; i < entries; i += 32) {
        scores[i] = expf(scores[i] - largest);
        sum += scores[i];
    }
    sum = warp_sum(sum);
    if (lane == 0 && sums != nullptr) sums[0] = largest, sums[1] = sum;
}

// Grid (cuts in turn, groups of heads, T), 256 threads. Shared memory: (kHeads + kWarps x kHeads) x kWidest floats.
extern "C" __global__ void __launch_bounds__(256) attend(Inputs inputs, const Shape s) {
    extern __shared__ float room[];
    __shared__ float scores[kHeads * kCut];
    __shared__ int positions[kCut];
    device::wait_for_previous();
    float *q = room, *values = room + kHeads * kWidest;
    const int t = blockIdx.z, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int group = s.heads / s.kv_heads, parts = (group + kHeads - 1) / kHeads;
    const int g = blockIdx.y / parts, head = g * group + blockIdx.y % parts * kHeads;
    const int heads = min(kHeads, (g + 1) * group - head);
    const int last = min(*inputs.position + t, s.positions - 1), complete = s.blocks == nullptr ? 0 : (last + 1) / s.block;
    const int* list = s.blocks == nullptr ? nullptr : s.blocks + static_cast<long long>(t) * s.listed;
    const int count = list == nullptr ? 0 : count_listed(s, list);
    const int entries = list == nullptr ? last + 1 : count * s.block + last + 1 - complete * s.block;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) s.counts[t] = entries;
    for (int i = threadIdx.x; i < kHeads * kWidest; i += blockDim.x) {
        const int h = i / kWidest, d = i % kWidest;
        q[i] = h < heads && d < s.width ? s.q[(static_cast<long long>(t) * s.heads + head + h) * s.width + d] : 0.0f;
    }
    for (int cut = blockIdx.x; cut * kCut < entries; cut += gridDim.x) {
        const int here = min(kCut, entries - cut * kCut);
        __syncthreads();
        for (int i = threadIdx.x; i < here; i += blockDim.x)
            positions[i] = position_of(s, list, count, complete, cut * kCut + i);
        __syncthreads();
        score_cut(s, q, positions, here, g, scores);
        __syncthreads();
        const long long at = (static_cast<long long>(t) * s.heads + head + warp) * s.cuts + cut;
        if (warp < kHeads) soften_cut(scores + warp * kCut, here, warp < heads ? s.sums + at * 2 : nullptr);
        __syncthreads();
        float acc[kHeads][8];
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[h][i] = 0.0f;
#pragma unroll 4
        for (int entry = warp * kPerWarp; entry < min(here, (warp + 1) * kPerWarp); ++entry) {
            float value[8];
            load_eight(s.v, s.is_bf16, static_cast<long long>(positions[entry]) * s.kv_heads + g, s.width, lane * 8,
                       value);
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
#pragma unroll
                for (int i = 0; i < 8; ++i) acc[h][i] = fused(scores[h * kCut + entry], value[i], acc[h][i]);
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int i = 0; i < 8; ++i) values[(warp * kHeads + h) * kWidest + lane * 8 + i] = acc[h][i];
        __syncthreads();
        for (int i = threadIdx.x; i < heads * s.width; i += blockDim.x) {
            const int h = i / s.width, d = i % s.width;
            float total = values[h * kWidest + d];
            for (int w = 1; w < kWarps; ++w) total += values[(w * kHeads + h) * kWidest + d];
            s.values[((static_cast<long long>(t) * s.heads + head + h) * s.cuts + cut) * s.width + d] = total;
        }
    }
}

// Grid (N, T), 256 threads: out[t, n] from the cuts of its list.
extern "C" __global__ void attend_combine(const Shape s, float* out) {
    __shared__ float totals[kWarps * kWidest], weights[kWarps];
    device::wait_for_previous();
    const int t = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long row = static_cast<long long>(t) * s.heads + blockIdx.x;
    const float* sums = s.sums + row * s.cuts * 2;
    const int cuts = (s.counts[t] + kCut - 1) / kCut;
    float largest = lowest();
    for (int cut = lane; cut < cuts; cut += 32) largest = fmaxf(largest, sums[cut * 2]);
    for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    float acc[kWidest / 32], weight = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidest / 32; ++i) acc[i] = 0.0f;
    for (int cut = warp; cut < cuts; cut += kWarps) {
        const float part = expf(sums[cut * 2] - largest);
        weight = fused(part, sums[cut * 2 + 1], weight);
#pragma unroll
        for (int i = 0; i < kWidest / 32; ++i)
            if (i * 32 + lane < s.width)
                acc[i] = fused(part, s.values[(row * s.cuts + cut) * s.width + i * 32 + lane], acc[i]);
    }
#pragma unroll
    for (int i = 0; i < kWidest / 32; ++i) totals[warp * kWidest + i * 32 + lane] = acc[i];
    if (lane == 0) weights[warp] = weight;
    __syncthreads();
    for (int d = threadIdx.x; d < s.width; d += blockDim.x) {
        float total = totals[d], all = weights[0];
        for (int w = 1; w < kWarps; ++w) total += totals[w * kWidest + d], all += weights[w];
        out[row * s.width + d] = total / all;
    }
}
