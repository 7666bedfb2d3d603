// The gated delta rule over the rows of a prompt, one after another, the state in registers: FP32, one order of sums,
// so a row's result and the state depend on nothing but the rows before.
//
// A block has one head's state for 16 columns: a warp four of them, eight lanes a column. Lane p of a column has its key
// rows 4 p .. 4 p + 3, 32 + 4 p .., and so on. Rows of keys, queries and values are staged ahead in shared memory.
#include "rows.h"
#include "tensor.h"

namespace strata {
namespace prompt {

constexpr int kLanes = 8;       // of a column
constexpr int kColumns = 16;    // of a block
constexpr int kThreads = kLanes * kColumns;
constexpr int kSteps = 16;      // rows that are staged at once

struct Delta {
    const float *q, *k, *v, *beta, *decay;  // T x G x D twice, T x N x V, T x N twice
    float *state, *out;                     // N x D x V, T x N x V
    int first, stop;                        // rows that are computed
    int key_heads, value_heads, key_width, value_width;
};

// kOwn: key rows of a lane, a multiple of 4; the width is at most 8 kOwn.
template <int kOwn>
__device__ __forceinline__ void run_delta(const Delta& a) {
    constexpr int kWide = kLanes * kOwn;
    __shared__ float keys[2][kSteps][kWide], queries[2][kSteps][kWide];
    __shared__ float values[2][kSteps][kColumns], gates[2][kSteps][2];
    const int lane = threadIdx.x & (kLanes - 1), own = threadIdx.x / kLanes;
    const int head = blockIdx.y, column = blockIdx.x * kColumns + own;
    const int key_head = head / (a.value_heads / a.key_heads), width = a.key_width;
    const bool there = column < a.value_width;
    float state[kOwn];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
        const int row = (j >> 2) * 4 * kLanes + lane * 4 + (j & 3);
        state[j] = there && row < width ? a.state[(static_cast<long long>(head) * width + row) * a.value_width + column] : 0.0f;
    }
    auto stage = [&](int base, int to) {
        const int steps = min(kSteps, a.stop - base);
        for (int i = threadIdx.x; i < kSteps * kWide; i += kThreads) {
            const int step = i / kWide, row = i % kWide;
            const bool inside = step < steps && row < width;
            const long long at = (static_cast<long long>(base + step) * a.key_heads + key_head) * width + row;
            keys[to][step][row] = inside ? a.k[at] : 0.0f;
            queries[to][step][row] = inside ? a.q[at] : 0.0f;
        }
        for (int i = threadIdx.x; i < kSteps * kColumns; i += kThreads) {
            const int step = i / kColumns, at = blockIdx.x * kColumns + i % kColumns;
            values[to][step][i % kColumns] =
                step < steps && at < a.value_width
                    ? a.v[(static_cast<long long>(base + step) * a.value_heads + head) * a.value_width + at]
                    : 0.0f;
        }
        for (int step = threadIdx.x; step < steps; step += kThreads) {
            const long long at = static_cast<long long>(base + step) * a.value_heads + head;
            gates[to][step][0] = expf(a.decay[at]);
            gates[to][step][1] = a.beta[at];
        }
    };
    int now = 0;
    if (a.first < a.stop) stage(a.first, now);
    __syncthreads();
    for (int base = a.first; base < a.stop; base += kSteps) {
        if (base + kSteps < a.stop) stage(base + kSteps, now ^ 1);
        const int steps = min(kSteps, a.stop - base);
        for (int step = 0; step < steps; ++step) {
            const float decay = gates[now][step][0], beta = gates[now][step][1];
            float known[4] = {0.0f, 0.0f, 0.0f, 0.0f}, seen[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            float alike[4] = {0.0f, 0.0f, 0.0f, 0.0f}, key[kOwn];
#pragma unroll
            for (int j = 0; j < kOwn; j += 4) {
                const int row = j * kLanes + lane * 4;
                const float4 k = *reinterpret_cast<const float4*>(&keys[now][step][row]);
                const float4 q = *reinterpret_cast<const float4*>(&queries[now][step][row]);
                key[j] = k.x, key[j + 1] = k.y, key[j + 2] = k.z, key[j + 3] = k.w;
                const float query[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    known[i] = rows::fused(key[j + i], state[j + i], known[i]);
                    seen[i] = rows::fused(query[i], state[j + i], seen[i]);
                    alike[i] = rows::fused(query[i], key[j + i], alike[i]);
                }
            }
            const float k_state = rows::lanes_sum<kLanes>((known[0] + known[1]) + (known[2] + known[3]));
            const float q_state = rows::lanes_sum<kLanes>((seen[0] + seen[1]) + (seen[2] + seen[3]));
            const float q_key = rows::lanes_sum<kLanes>((alike[0] + alike[1]) + (alike[2] + alike[3]));
            const float change = (values[now][step][own] - decay * k_state) * beta;
#pragma unroll
            for (int j = 0; j < kOwn; ++j) state[j] = rows::fused(key[j], change, state[j] * decay);
            if (there && lane == 0)
                a.out[(static_cast<long long>(base + step) * a.value_heads + head) * a.value_width + column] =
                    rows::fused(q_key, change, decay * q_state);
        }
        __syncthreads();
        now ^= 1;
    }
    if (!there) return;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
        const int row = (j >> 2) * 4 * kLanes + lane * 4 + (j & 3);
        if (row < width) a.state[(static_cast<long long>(head) * width + row) * a.value_width + column] = state[j];
    }
}

}  // namespace prompt
}  // namespace strata

extern "C" __global__ void __launch_bounds__(128) delta_32(strata::prompt::Delta a) { strata::prompt::run_delta<4>(a); }
extern "C" __global__ void __launch_bounds__(128) delta_64(strata::prompt::Delta a) { strata::prompt::run_delta<8>(a); }
extern "C" __global__ void __launch_bounds__(128) delta_128(strata::prompt::Delta a) { strata::prompt::run_delta<16>(a); }
