// The gated delta net: causal convolution, the inputs of the recurrence, the recurrence, the gated norm.
//
// `gated_delta` is bound by the state: N x D x V x 4 bytes read, and written when rows are folded (3.1 MB each way for
// 48 x 128 x 128: 0.8 us at 4.1 TB/s). Folding and the window run one function for a row, so folding row by row, or as
// windows of any size, gives the same bits.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

// silu of the depthwise convolution at row t of z = tail ++ x, taps rising, the last one at the row itself.
__device__ __forceinline__ float convolve(const float* x, const float* tail, const float* weight, int channels, int taps,
                                          int dilation, int t, int c) {
    const int tail_rows = (taps - 1) * dilation;
    float sum = 0.0f;
    for (int w = 0; w < taps; ++w) {
        const int z = t + w * dilation;
        const float value = z < tail_rows ? tail[static_cast<long long>(z) * channels + c]
                                          : x[static_cast<long long>(z - tail_rows) * channels + c];
        sum = w == 0 ? weight[c * taps] * value : fused(weight[c * taps + w], value, sum);
    }
    return silu(sum);
}

extern "C" __global__ void causal_conv(const float* x, const float* tail, const float* weight, int rows, int channels,
                                       int taps, int dilation, float* y) {
    device::wait_for_previous();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * channels; i += gridDim.x * blockDim.x)
        y[i] = convolve(x, tail, weight, channels, taps, dilation, i / channels, i % channels);
}

struct DeltaShape {
    const float *qkv, *tail, *conv, *b, *a, *log_decay, *dt_bias;
    float *q, *k, *v, *beta, *g;
    int taps, key_heads, value_heads, key_width, value_width, unused;
    float scale;  // of queries
    int unused_too;
};

constexpr int kWidestHead = 256;

// Grid (2 G + N + 1, T), 128 threads: a head of queries, keys or values each; the last block makes the gates.
extern "C" __global__ void delta_inputs(const DeltaShape s) {
    __shared__ float values[kWidestHead], room[32];
    device::wait_for_previous();
    const int t = blockIdx.y, head = blockIdx.x, keys = s.key_heads * s.key_width;
    const int channels = 2 * keys + s.value_heads * s.value_width;
    if (head == 2 * s.key_heads + s.value_heads) {
        for (int n = threadIdx.x; n < s.value_heads; n += blockDim.x) {
            const int at = t * s.value_heads + n;
            const float step = s.a[at] + s.dt_bias[n];
            s.beta[at] = sigmoid(s.b[at]);
            s.g[at] = -(expf(s.log_decay[n]) * (step > 20.0f ? step : log1pf(expf(step))));
        }
        return;
    }
    if (head >= 2 * s.key_heads) {
        const int n = head - 2 * s.key_heads;
        for (int i = threadIdx.x; i < s.value_width; i += blockDim.x)
            s.v[(static_cast<long long>(t) * s.value_heads + n) * s.value_width + i] =
                convolve(s.qkv, s.tail, s.conv, channels, s.taps, 1, t, 2 * keys + n * s.value_width + i);
        return;
    }
    float sum = 0.0f;
    for (int i = threadIdx.x; i < s.key_width; i += blockDim.x) {
        const float value = convolve(s.qkv, s.tail, s.conv, channels, s.taps, 1, t, head * s.key_width + i);
        values[i] = value;
        sum = fused(value, value, sum);
    }
    const float inverse = 1.0f / sqrtf(block_sum(sum, room) + 1e-6f);
    const bool is_query = head < s.key_heads;
    float* out = is_query ? s.q : s.k;
    const long long at = (static_cast<long long>(t) * s.key_heads + head % s.key_heads) * s.key_width;
    for (int i = threadIdx.x; i < s.key_width; i += blockDim.x)
        out[at + i] = is_query ? values[i] * inverse * s.scale : values[i] * inverse;
}

struct DeltaRows {
    const float *k, *v, *beta, *g;
};

struct StateShape {
    DeltaRows pending, now;  // pending.k null: nothing to fold
    const float* q;
    float *state, *out;
    int rows, key_heads, value_heads, key_width, value_width, unused;
};

constexpr int kColumns = 32, kWarps = 4;

// One row on the state that the block holds: thread (warp, lane) has rows warp * kSlice .. of column `lane`. Sums over D
// run over a thread's rows rising, then over warps rising. `sums` holds 2 x kWarps x 32 floats: for S^T k and S^T q.
template <int kSlice>
__device__ __forceinline__ float delta_row(float* state, const float* k, const float* q, float v, float beta, float decay,
                                           float* sums) {
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * kSlice;
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlice; ++i) part = fused(k[first + i], state[i], part);
    sums[(threadIdx.x >> 5) * 32 + lane] = part;
    __syncthreads();
    float known = sums[lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) known += sums[w * 32 + lane];
    const float change = (v - known * decay) * beta;
    part = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlice; ++i) {
        state[i] = fused(k[first + i], change, state[i] * decay);
        if (q != nullptr) part = fused(q[first + i], state[i], part);
    }
    if (q != nullptr) sums[(kWarps + (threadIdx.x >> 5)) * 32 + lane] = part;
    __syncthreads();
    float out = 0.0f;
    if (q != nullptr) {
        out = sums[kWarps * 32 + lane];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) out += sums[(kWarps + w) * 32 + lane];
    }
    return out;
}

// Grid (tiles of 32 columns, N), 128 threads. Shared memory: (8 + 2 T) x 4 kSlice floats of keys and queries.
template <int kSlice>
__device__ void run_state(const Inputs& inputs, const StateShape& s, float* vectors) {
    __shared__ float sums[2 * kWarps * 32];
    constexpr int kWide = kSlice * kWarps;
    const int n = blockIdx.y, group = n / (s.value_heads / s.key_heads), lane = threadIdx.x & 31;
    const int column = blockIdx.x * kColumns + lane, first = (threadIdx.x >> 5) * kSlice;
    const bool is_inside = column < s.value_width;
    float state[kSlice];
    float* place = s.state + (static_cast<long long>(n) * s.key_width + first) * s.value_width + column;
    device::wait_for_previous();
#pragma unroll
    for (int i = 0; i < kSlice; ++i)
        state[i] = is_inside && first + i < s.key_width ? place[static_cast<long long>(i) * s.value_width] : 0.0f;
    const int folded = s.pending.k == nullptr ? 0 : max(0, min(*inputs.accepted, kMaxWindow));
    float *now = vectors + kMaxWindow * kWide, *queries = now + s.rows * kWide;
    for (int i = threadIdx.x; i < (folded + 2 * s.rows) * kWide; i += blockDim.x) {
        const int row = i / kWide, d = i % kWide;
        const bool is_pending = row < folded, is_now = row < folded + s.rows;
        const int t = is_pending ? row : is_now ? row - folded : row - folded - s.rows;
        const float* from = is_pending ? s.pending.k : is_now ? s.now.k : s.q;
        const float value = d < s.key_width ? from[(t * s.key_heads + group) * s.key_width + d] : 0.0f;
        (is_pending ? vectors : is_now ? now : queries)[t * kWide + d] = value;
    }
    __syncthreads();
    for (int t = 0; t < folded; ++t) {
        const int at = t * s.value_heads + n;
        const float v = is_inside ? s.pending.v[static_cast<long long>(at) * s.value_width + column] : 0.0f;
        delta_row<kSlice>(state, vectors + t * kWide, nullptr, v, s.pending.beta[at], expf(s.pending.g[at]), sums);
    }
    if (folded > 0 && is_inside)
#pragma unroll
        for (int i = 0; i < kSlice; ++i)
            if (first + i < s.key_width) place[static_cast<long long>(i) * s.value_width] = state[i];
    for (int t = 0; t < s.rows; ++t) {
        const int at = t * s.value_heads + n;
        const float v = is_inside ? s.now.v[static_cast<long long>(at) * s.value_width + column] : 0.0f;
        const float out = delta_row<kSlice>(state, now + t * kWide, queries + t * kWide, v, s.now.beta[at],
                                            expf(s.now.g[at]), sums);
        if (is_inside && threadIdx.x < 32) s.out[static_cast<long long>(at) * s.value_width + column] = out;
    }
}

#define STRATA_GATED_DELTA(SLICE)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) gated_delta_##SLICE(Inputs inputs, const StateShape s) { \
        extern __shared__ float vectors[];                                                                   \
        run_state<SLICE>(inputs, s, vectors);                                                                \
    }

STRATA_GATED_DELTA(8)
STRATA_GATED_DELTA(32)
STRATA_GATED_DELTA(64)

// weight * o * rsqrt(mean(o^2) + eps) * gate(z) of `count` vectors, a warp each.
extern "C" __global__ void gated_norm(const float* o, const float* z, const float* weight, float eps, int is_silu,
                                      int count, int width, float* y) {
    device::wait_for_previous();
    const int lane = threadIdx.x & 31, row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const long long at = static_cast<long long>(min(row, count - 1)) * width;
    float sum = 0.0f;
    for (int i = lane; i < width; i += 32) sum = fused(o[at + i], o[at + i], sum);
    const float inverse = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(width) + eps);
    if (row < count)
        for (int i = lane; i < width; i += 32)
            y[at + i] = o[at + i] * inverse * weight[i] * (is_silu ? silu(z[at + i]) : sigmoid(z[at + i]));
}
