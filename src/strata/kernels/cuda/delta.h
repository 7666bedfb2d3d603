// What the launches of the gated delta net share: its inputs, the block's part of a state, one row of the recurrence.
//
// Folding and the window run one function for a row, so folding row by row, or as windows of any size, gives the same
// bits. Compiled without contraction; see rows.h.
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

constexpr int kColumns = 32, kWarps = 4, kThreads = 32 * kWarps;

// Four sums, of the elements whose index is 0, 1, 2, 3 modulo 4, then two and two: a shorter chain than one sum.
template <int kSlice>
__device__ __forceinline__ float dot_state(const float (&state)[kSlice], const float* vector) {
    float parts[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSlice; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(vector + i);
        parts[0] = fused(x.x, state[i], parts[0]), parts[1] = fused(x.y, state[i + 1], parts[1]);
        parts[2] = fused(x.z, state[i + 2], parts[2]), parts[3] = fused(x.w, state[i + 3], parts[3]);
    }
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Of [kWarps] floats, `pitch` apart, warps rising.
__device__ __forceinline__ float sum_of(const float* sums, int pitch = 1) {
    float total = sums[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w * pitch];
    return total;
}

// Of `sums` [kWarps, 32] the sum of this lane's column.
__device__ __forceinline__ float sum_of_warps(const float* sums) { return sum_of(sums + (threadIdx.x & 31), 32); }

// One row on the state that the block holds: thread (warp, lane) of the first kThreads has rows warp * kSlice .. of
// column `lane`; others come for the barrier. A thread's part of S^T q, if there is a q, is left in `outs` [kThreads].
// `sums` [kThreads] must not be the one of the row before: one barrier a row is enough with two that take turns.
template <int kSlice>
__device__ __forceinline__ void delta_row(float (&state)[kSlice], const float* k, const float* q, float v, float beta,
                                          float decay, float* sums, float* outs) {
    const int first = (threadIdx.x >> 5) * kSlice;
    const bool is_holder = threadIdx.x < kThreads;
    if (is_holder) sums[threadIdx.x] = dot_state(state, k + first);
    __syncthreads();
    if (!is_holder) return;
    const float change = (v - sum_of_warps(sums) * decay) * beta;
#pragma unroll
    for (int i = 0; i < kSlice; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(k + first + i);
        state[i] = fused(x.x, change, state[i] * decay), state[i + 1] = fused(x.y, change, state[i + 1] * decay);
        state[i + 2] = fused(x.z, change, state[i + 2] * decay);
        state[i + 3] = fused(x.w, change, state[i + 3] * decay);
    }
    if (q != nullptr) outs[threadIdx.x] = dot_state(state, q + first);
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
};

// Warp w writes rows w, w + kWarps, ..; `outs` [T, kThreads] after a barrier.
__device__ __forceinline__ void write_outs(const Tile& tile, const float* outs, int rows, int value_heads, float* out) {
    if (threadIdx.x >= kThreads) return;
    for (int t = threadIdx.x >> 5; t < rows; t += kWarps) {
        const float total = sum_of_warps(outs + t * kThreads);
        if (tile.is_inside) out[(t * value_heads + tile.n) * tile.value_width + tile.column] = total;
    }
}

}  // namespace rows
}  // namespace strata
