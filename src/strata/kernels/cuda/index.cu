// The sparse index: scores of blocks and the selection of the best, ids ascending. heads.cu makes the keys of blocks.
//
// Bytes: `score_blocks` reads complete blocks x D x 4 (16.8 MB at 128K tokens in blocks of 4: 4.1 us at 4.1 TB/s), and
// nothing while every block is selected anyway. A selection reads a row's scores five times through one multiprocessor,
// integers only, so its result depends on no order.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

constexpr int kSelectThreads = 1024, kSelectWarps = 32, kBins = 2048;

// Scores are at least 0 or NaN: their bits order like they do, NaN below all.
__device__ __forceinline__ unsigned score_key(float score) { return score != score ? 0u : __float_as_uint(score) + 1u; }

// What a selection shares.
struct Selecting {
    unsigned bins[kBins];
    int sums[kSelectWarps], above[kSelectWarps], equal[kSelectWarps], chosen[2];
};

// Bits of the digit at `shift` of the rank-th largest key among those that agree with `prefix` above; rank becomes the
// rank among those of that digit. Digits are 11 bits.
__device__ unsigned select_digit(const float* scores, int n, int shift, unsigned prefix, Selecting& room, int& rank) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) room.bins[i] = 0;
    __syncthreads();
    int zeros = 0;  // exact zeros are common (relu): counted apart, they would all meet in one bin
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
        const unsigned key = score_key(scores[i]);
        if (shift + 11 < 32 && key >> (shift + 11) != prefix) continue;
        if (key == 1u)
            ++zeros;
        else
            atomicAdd(&room.bins[key >> shift & (kBins - 1)], 1u);
    }
    for (int step = 16; step > 0; step >>= 1) zeros += __shfl_xor_sync(kAll, zeros, step);
    if (lane == 0 && zeros > 0) atomicAdd(&room.bins[1u >> shift], static_cast<unsigned>(zeros));
    __syncthreads();
    static_assert(kBins == 2 * kSelectThreads, "a thread has two bins, the highest come first");
    const int high = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
    const int first = static_cast<int>(room.bins[high]), second = static_cast<int>(room.bins[high - 1]);
    int upto = first + second;
    for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(kAll, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) room.sums[warp] = upto;
    __syncthreads();
    int before = lane < warp ? room.sums[lane] : 0;
    for (int step = 16; step > 0; step >>= 1) before += __shfl_xor_sync(kAll, before, step);
    upto += before, before = upto - first - second;
    if (before <= rank && rank < upto) {
        const bool is_second = rank >= before + first;
        room.chosen[0] = high - is_second;
        room.chosen[1] = rank - before - (is_second ? first : 0);
    }
    __syncthreads();
    rank = room.chosen[1];
    const unsigned digit = static_cast<unsigned>(room.chosen[0]);
    __syncthreads();
    return digit;
}

// ids [top] of n scores: all of them if there are at most `top`, else the best by (score descending, id ascending);
// ascending, padded with -1.
__device__ void select_row(const float* scores, int n, int top, int* ids, Selecting& room) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (n <= top) {
        for (int i = threadIdx.x; i < top; i += kSelectThreads) ids[i] = i < n ? i : -1;
        return;
    }
    int rank = top - 1;
    unsigned cut = select_digit(scores, n, 22, 0, room, rank);
    cut = cut << 11 | select_digit(scores, n, 11, cut, room, rank);
    cut = cut << 11 | select_digit(scores, n, 0, cut, room, rank);
    const int ties = rank + 1;  // of the blocks whose key is the cut, the first so many are taken
    const int share = (n + kSelectWarps * 32 - 1) / (kSelectWarps * 32) * 32, first = warp * share;
    int larger = 0, same = 0;
    for (int i = first + lane; i < first + share; i += 32) {
        const unsigned key = i < n ? score_key(scores[i]) : 0u;
        larger += __popc(__ballot_sync(kAll, i < n && key > cut));
        same += __popc(__ballot_sync(kAll, i < n && key == cut));
    }
    if (lane == 0) room.above[warp] = larger, room.equal[warp] = same;
    __syncthreads();
    int taken = 0, seen = 0;  // ids before this warp's part: taken, and equal to the cut
    for (int w = 0; w < warp; ++w) {
        taken += room.above[w] + max(0, min(room.equal[w], ties - seen));
        seen += room.equal[w];
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

// Grid (T), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    select_blocks(Inputs inputs, const float* scores, int members, int top, int blocks, int* ids) {
    __shared__ Selecting room;
    device::let_next_start();
    device::wait_for_previous();
    const long long t = blockIdx.x;
    const int n = min((*inputs.position + static_cast<int>(t) + 1) / members, blocks);
    select_row(scores + t * blocks, n, top, ids + t * top, room);
}

// scores[t, b] = sum over heads rising of relu(q . key); NaN stays. A warp a block and row; order of a dot product: a
// lane's columns l, l + 32, ... rising, then the tree. Nothing is computed while no row sees more than `top` blocks.
// With `arrived` (of one row only, 0 between launches) the last block to end selects as well.
extern "C" __global__ void __launch_bounds__(1024)
    score_blocks(Inputs inputs, const float* q, const float* keys, int rows, int heads, int width, int members, int top,
                 int blocks, float* scores, unsigned* arrived, int* ids) {
    extern __shared__ float queries[];
    __shared__ Selecting room;
    __shared__ int is_last;
    device::let_next_start();
    device::wait_for_previous();
    const int lane = threadIdx.x & 31, start = *inputs.position, most = min((start + rows) / members, blocks);
    if (most <= top) {
        if (arrived != nullptr && blockIdx.x == 0) select_row(scores, most, top, ids, room);
        return;
    }
    for (int i = threadIdx.x; i < rows * heads * width; i += kSelectThreads) queries[i] = q[i];
    __syncthreads();
    for (int b = blockIdx.x * kSelectWarps + (threadIdx.x >> 5); b < most; b += gridDim.x * kSelectWarps) {
        float key[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            key[i] = i * 32 + lane < width ? keys[static_cast<long long>(b) * width + i * 32 + lane] : 0.0f;
        for (int t = 0; t < rows; ++t) {
            if ((b + 1) * members > start + t + 1) continue;
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
    if (arrived == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *arrived = 0;
    select_row(scores, most, top, ids, room);
}
