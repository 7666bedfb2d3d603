// What the launches of the gated delta net share: its inputs, the block's part of a state, one row of the recurrence.
//
// Folding and the window run one function for a row, so folding row by row, or as windows of any size, gives the same
// bits. A row's result is made of what its query finds before the row, so that nobody waits for the state to move.
// Compiled without contraction; see rows.h.
#pragma once
#include "device.h"
#include "rows.h"

namespace strata {
namespace rows {

struct DeltaShape {
    const float *qkv, *tail, *conv, *b, *a, *log_decay, *dt_bias;
    float *q, *k, *v, *beta, *g;
    int taps, key_heads, value_heads, key_width, value_width, rows;
    float scale;  // of queries
    int unused;
};

__device__ __forceinline__ float log_decay_of(float a, float dt_bias, float log_decay) {
    const float step = a + dt_bias;
    return -(expf(log_decay) * (step > 20.0f ? step : log1pf(expf(step))));
}

__device__ __forceinline__ int word(const int* at) {
    return static_cast<int>(device::load_relaxed(reinterpret_cast<const unsigned*>(at)));
}

// Of two vectors in shared memory, in every lane: a lane's columns are four neighbours in every 128, their sum is fused
// in order from zero, then the warp's tree. delta_head.h has the same sums of what lanes hold.
__device__ __forceinline__ float dot_vectors(const float* x, const float* y, int width) {
    float sum = 0.0f;
    for (int first = (threadIdx.x & 31) * 4; first < width; first += 128)
        for (int i = first; i < first + 4 && i < width; ++i) sum = fused(x[i], y[i], sum);
    return warp_sum(sum);
}

// What makes a query or a key one of length 1, from the sum of its squares.
__device__ __forceinline__ float inverse_length(float squares) { return rsqrtf(squares + 1e-6f); }

// What is added to a state along a key: `found` is what the state holds there, before it has decayed.
__device__ __forceinline__ float change_of(float v, float found, float beta, float decay) {
    return fused(-decay, found, v) * beta;
}

// What a query finds in the state after that, without waiting for it: `found` is what it finds before.
__device__ __forceinline__ float result_of(float found, float decay, float query_times_key, float change) {
    return fused(query_times_key, change, found * decay);
}

constexpr int kColumns = 32, kWarps = 4, kThreads = 32 * kWarps;

// Four sums, each of a quarter of the elements in rising order, then the first and the third, the second and the
// fourth, and both: the order of four lanes that hold a quarter each (delta_head.h).
template <int kSlice>
__device__ __forceinline__ float dot_state(const float (&state)[kSlice], const float* vector) {
    constexpr int kPart = kSlice / 4;
    float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSlice; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(vector + i);
        parts[i / kPart] = fused(x.x, state[i], parts[i / kPart]);
        parts[(i + 1) / kPart] = fused(x.y, state[i + 1], parts[(i + 1) / kPart]);
        parts[(i + 2) / kPart] = fused(x.z, state[i + 2], parts[(i + 2) / kPart]);
        parts[(i + 3) / kPart] = fused(x.w, state[i + 3], parts[(i + 3) / kPart]);
    }
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

// Of [kWarps, 32] sums the total of this lane's column, warps rising.
__device__ __forceinline__ float sum_of_warps(const float* sums) {
    const float* mine = sums + (threadIdx.x & 31);
    return ((mine[0] + mine[32]) + mine[64]) + mine[96];
}

// One row on the state that the block holds: thread (warp, lane) of the first kThreads has rows warp * kSlice .. of
// column `lane`; others come for the barrier. Returns what q, if there is one, finds after it. `moves`: the state is
// needed after this row. `sums` [2, kThreads] must not be the one of the row before: one barrier a row is enough with
// two that take turns.
template <int kSlice>
__device__ __forceinline__ float delta_row(float (&state)[kSlice], const float* k, const float* q, float v, float beta,
                                           float decay, float* sums, bool moves) {
    const int first = (threadIdx.x >> 5) * kSlice;
    const bool is_holder = threadIdx.x < kThreads;
    if (is_holder) sums[threadIdx.x] = dot_state(state, k + first);
    if (is_holder && q != nullptr) sums[kThreads + threadIdx.x] = dot_state(state, q + first);
    __syncthreads();
    if (!is_holder) return 0.0f;
    const float change = change_of(v, sum_of_warps(sums), beta, decay);
    if (moves)
#pragma unroll
        for (int i = 0; i < kSlice; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(k + first + i);
            state[i] = fused(x.x, change, state[i] * decay), state[i + 1] = fused(x.y, change, state[i + 1] * decay);
            state[i + 2] = fused(x.z, change, state[i + 2] * decay);
            state[i + 3] = fused(x.w, change, state[i + 3] * decay);
        }
    if (q == nullptr) return 0.0f;
    return result_of(sum_of_warps(sums + kThreads), decay, dot_vectors(q, k, kSlice * kWarps), change);
}

// The block's part of a state: columns `column` of head n, rows from `first` for this thread.
struct Tile {
    int n, column, first, key_width, value_width;
    bool is_inside;
    float* place;

    __device__ __forceinline__ Tile(float* state, int key_width, int value_width, int slice)
        : n(blockIdx.y), column(blockIdx.x * kColumns + (threadIdx.x & 31)), first((threadIdx.x >> 5) * slice),
          key_width(key_width), value_width(value_width), is_inside(column < value_width),
          place(state + (static_cast<long long>(n) * key_width + first) * value_width + column) {}

    template <int kSlice>
    __device__ __forceinline__ void load(float (&state)[kSlice]) const {
#pragma unroll
        for (int i = 0; i < kSlice; ++i) state[i] = is_inside && first + i < key_width ? place[i * value_width] : 0.0f;
    }

    template <int kSlice>
    __device__ __forceinline__ void store(const float (&state)[kSlice]) const {
#pragma unroll
        for (int i = 0; i < kSlice; ++i)
            if (is_inside && first + i < key_width) place[i * value_width] = state[i];
    }

    // Row t of the results [T, N, V], which all warps have: each writes some.
    __device__ __forceinline__ void put(float* out, int t, int heads, float value) const {
        if (static_cast<int>(threadIdx.x >> 5) == t % kWarps && is_inside)
            out[(t * heads + n) * value_width + column] = value;
    }
};

}  // namespace rows
}  // namespace strata
