// The router of a row: its top_k logits by (logit descending, id ascending), NaN last, and their softmax weights.
//
// Keys order like the logits; 0 is one that is taken or not there, 1 a NaN. Renormalised weights are exp(x - largest) over
// their own sum, in the order of the picks: the sum over all experts cancels. Else that sum runs over a lane's ids (l,
// l + 32, ...) rising, then the warp's tree.
#pragma once
#include "rows.h"

namespace strata {
namespace rows {

constexpr int kChunk = 64, kChunks = 8;  // logits that a warp looks at where a block routes a row; warps
constexpr int kBlockPicks = 32;          // picks of a row that a block routes, at most

__device__ __forceinline__ float value_of(unsigned key) { return unordered(key - 1); }

// The sum of exp(x - largest) over all experts, by a warp.
__device__ __forceinline__ float sum_exp(const float* logits, int experts, float largest) {
    float sum = 0.0f;
    for (int i = threadIdx.x & 31; i < experts; i += 32) sum += expf(logits[i] - largest);
    return warp_sum(sum);
}

// By one warp; lane l holds the logits of ids l, l + 32, ...
template <int kOwn>
__device__ __forceinline__ void route(const float* logits, int experts, int top_k, bool renormalise, int* ids,
                                      float* weights) {
    const int lane = threadIdx.x & 31;
    float own[kOwn], total = 0.0f, largest = 0.0f, sum = 1.0f;
    unsigned keys[kOwn], best = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = i * 32 + lane < experts ? logits[i * 32 + lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        keys[i] = i * 32 + lane < experts ? ordered(own[i]) + 1 : 0;
        best = keys[i] > best ? keys[i] : best;
    }
    for (int first = 0; first < top_k; first += 32) {
        const int count = min(top_k - first, 32);
        unsigned key = 0;  // of pick first + lane
        int chosen = 0;
        for (int k = 0; k < count; ++k) {
            const unsigned most = warp_largest(best);
            unsigned at = kAll;  // the lowest id of this lane that has it
#pragma unroll
            for (int i = kOwn - 1; i >= 0; --i) at = keys[i] == most ? i * 32 + lane : at;
            const unsigned id = ~warp_largest(~at);
            best = 0;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                keys[i] = i * 32 + lane == static_cast<int>(id) ? 0 : keys[i];
                best = keys[i] > best ? keys[i] : best;
            }
            if (lane == k) key = most, chosen = static_cast<int>(id);
        }
        if (first == 0) {
            largest = value_of(__shfl_sync(kAll, key, 0));
            if (!renormalise) sum = sum_exp(logits, experts, largest);
        }
        const float weight = lane < count ? expf(value_of(key) - largest) / sum : 0.0f;
        for (int k = 0; k < count; ++k) total += __shfl_sync(kAll, weight, k);
        if (lane < count) {
            ids[first + lane] = chosen;
            weights[first + lane] = renormalise && top_k <= 32 ? weight / total : weight;
        }
    }
    if (renormalise && top_k > 32)
        for (int k = lane; k < top_k; k += 32) weights[k] /= total;  // a lane's own
}

// By a whole warp. kMost: experts that it can be asked for.
template <int kMost>
__device__ __forceinline__ void route_row(const float* logits, int experts, int top_k, bool renormalise, int* ids,
                                          float* weights) {
    if (experts <= 4 * 32)
        route<4>(logits, experts, top_k, renormalise, ids, weights);
    else if (kMost <= 16 * 32 || experts <= 16 * 32)
        route<16>(logits, experts, top_k, renormalise, ids, weights);
    else
        route<kMost / 32>(logits, experts, top_k, renormalise, ids, weights);
}

struct __align__(16) ChunkPicks {
    unsigned all[kChunks][kChunk];  // every key
    unsigned keys[kChunks][kBlockPicks], best[kBlockPicks];  // 0 behind a chunk's picks
    int ids[kChunks][kBlockPicks], best_ids[kBlockPicks];
};

// One row of up to kChunks * kChunk logits by a block of at least so many warps, with the bits of `route`: the first warps
// find the first picks of a chunk each, then all threads place them. Returns the id and weight of pick `lane` in warp 0; other
// warps get nothing, and go on after the barrier.
__device__ __forceinline__ void route_by_block(const float* logits, int experts, int top_k, bool renormalise,
                                               ChunkPicks& room, int* id, float* weight) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = warp * kChunk;
    if (first < experts) {
        const float low = first + lane < experts ? logits[first + lane] : 0.0f;
        const float high = first + 32 + lane < experts ? logits[first + 32 + lane] : 0.0f;
        const unsigned low_key = first + lane < experts ? ordered(low) + 1 : 0;
        const unsigned high_key = first + 32 + lane < experts ? ordered(high) + 1 : 0;
        room.all[warp][lane] = low_key;
        room.all[warp][32 + lane] = high_key;
        if (lane >= top_k) room.keys[warp][lane] = 0;
        __syncwarp();
        // Counted and not picked one after the other: no step waits for the one before. An equal key comes first if its id
        // is lower. Few instructions, which run many times: the first run of each waits for the code itself.
        const uint4* theirs = reinterpret_cast<const uint4*>(room.all[warp]);
        int low_rank = 0, high_rank = 0;
#pragma unroll 1
        for (int four = 0; four < 8; ++four) {
            const uint4 a = theirs[four], b = theirs[8 + four];
            const unsigned lows[4] = {a.x, a.y, a.z, a.w}, highs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned first_wins = four * 4 + i < lane ? 1u : 0u;
                low_rank += (lows[i] + first_wins > low_key) + (highs[i] > low_key);
                high_rank += (lows[i] >= high_key) + (highs[i] + first_wins > high_key);
            }
        }
        if (low_rank < top_k) room.keys[warp][low_rank] = low_key, room.ids[warp][low_rank] = first + lane;
        if (high_rank < top_k) room.keys[warp][high_rank] = high_key, room.ids[warp][high_rank] = first + 32 + lane;
    }
    __syncthreads();
    // Where each chunk's picks stand among all: those that are larger, and the equal ones of lower ids, which come before.
    const int chunks = (experts + kChunk - 1) / kChunk, mine = threadIdx.x / kBlockPicks, place = threadIdx.x % kBlockPicks;
    if (mine < chunks && place < top_k) {
        const unsigned key = room.keys[mine][place];
        int rank = place;
#pragma unroll 1
        for (int k = 0; k < top_k; k += 4) {  // four picks of every chunk under way at once
            uint4 theirs[kChunks];
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
                if (chunk < chunks) theirs[chunk] = *reinterpret_cast<const uint4*>(room.keys[chunk] + k);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                if (chunk >= chunks || chunk == mine) continue;
                const unsigned first_wins = chunk < mine ? 1u : 0u;
                rank += (theirs[chunk].x + first_wins > key) + (theirs[chunk].y + first_wins > key) +
                        (theirs[chunk].z + first_wins > key) + (theirs[chunk].w + first_wins > key);
            }
        }
        if (rank < top_k) room.best[rank] = key, room.best_ids[rank] = room.ids[mine][place];
    }
    __syncthreads();
    if (warp != 0) return;
    const unsigned key = lane < top_k ? room.best[lane] : 0;
    if (lane < top_k) *id = room.best_ids[lane];
    const float largest = value_of(__shfl_sync(kAll, key, 0));
    const float sum = renormalise ? 1.0f : sum_exp(logits, experts, largest);
    *weight = lane < top_k ? expf(value_of(key) - largest) / sum : 0.0f;
    float total = 0.0f;
#pragma unroll 5
    for (int k = 0; k < top_k; ++k) total += __shfl_sync(kAll, *weight, k);
    if (renormalise) *weight /= total;
}

}  // namespace rows
}  // namespace strata
