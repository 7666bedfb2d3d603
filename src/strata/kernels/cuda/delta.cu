// The gated delta net: causal convolution, the inputs of the recurrence, the recurrence, the gated norm.
//
// Each operation by itself; a recorded round has a layer's in one launch (delta_step.cu), with the same bits.
#include "delta.h"
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

// silu of the depthwise convolution at row t of z = tail ++ x, taps rising, the last one at the row itself.
__device__ __forceinline__ float convolve(const float* x, const float* tail, const float* weight, int channels,
                                          int taps, int t, int c) {
    const int tail_rows = taps - 1;
    float sum = 0.0f;
    for (int w = 0; w < taps; ++w) {
        const int z = t + w;
        const float value = z < tail_rows ? tail[static_cast<long long>(z) * channels + c]
                                          : x[static_cast<long long>(z - tail_rows) * channels + c];
        sum = w == 0 ? weight[c * taps] * value : fused(weight[c * taps + w], value, sum);
    }
    return silu(sum);
}

struct ConvStep {
    const float *x, *tail, *weight;      // T x C; U x C; C x taps
    float* kept;                         // 2 x (U + W) x C, or null: the rows before x are `tail`
    const int* turn;                     // the copy of `kept` that the round before has written
    const float *first, *second;         // T x C or null: y = second + (first + conv)
    float* y;
    int rows, channels, taps, dilation;
};

// Grid (blocks of channels, T), a thread a channel; with `kept` (.., T + U + T): the rows after the first T write what
// the next round has before its own rows.
extern "C" __global__ void causal_conv(Inputs inputs, const ConvStep s) {
    constexpr int kAhead = 4;
    const int c = blockIdx.x * blockDim.x + threadIdx.x, tail_rows = (s.taps - 1) * s.dilation;
    const int t = blockIdx.y, own = min(c, s.channels - 1);
    device::let_next_start();
    float weight[kAhead], values[kAhead];
#pragma unroll
    for (int w = 0; w < kAhead; ++w) weight[w] = w < s.taps ? s.weight[own * s.taps + w] : 0.0f;
    device::wait_for_previous();
    const float* tail = s.tail;
    const int copy = (tail_rows + kMaxWindow) * s.channels;
    int turn = 0;
    if (s.kept != nullptr) {
        turn = *s.turn & 1;
        tail = s.kept + turn * copy + max(0, min(*inputs.accepted, kMaxWindow)) * s.channels;
    }
    if (c >= s.channels) return;
    const auto row = [&](int z) {
        return z < tail_rows ? tail[z * s.channels + c] : s.x[(z - tail_rows) * s.channels + c];
    };
    if (t >= s.rows) {
        s.kept[(turn ^ 1) * copy + (t - s.rows) * s.channels + c] = row(t - s.rows);
        return;
    }
    const int at = t * s.channels + c;
#pragma unroll
    for (int w = 0; w < kAhead; ++w) values[w] = w < s.taps ? row(t + w * s.dilation) : 0.0f;
    const float first = s.first == nullptr ? 0.0f : s.first[at], second = s.second == nullptr ? 0.0f : s.second[at];
    float sum = weight[0] * values[0];
#pragma unroll
    for (int w = 1; w < kAhead; ++w)
        if (w < s.taps) sum = fused(weight[w], values[w], sum);
    for (int w = kAhead; w < s.taps; ++w) sum = fused(s.weight[c * s.taps + w], row(t + w * s.dilation), sum);
    float y = silu(sum);
    if (s.first != nullptr) y = first + y;
    if (s.second != nullptr) y = second + y;
    s.y[at] = y;
}

constexpr int kWidestHead = 256;

// Grid (2 G + N + 1, T), 128 threads: a head of queries, keys or values each; the last block makes the gates.
extern "C" __global__ void delta_inputs(const DeltaShape s) {
    __shared__ float values[kWidestHead];
    device::wait_for_previous();
    const int t = blockIdx.y, head = blockIdx.x, keys = s.key_heads * s.key_width;
    const int channels = 2 * keys + s.value_heads * s.value_width;
    if (head == 2 * s.key_heads + s.value_heads) {
        for (int n = threadIdx.x; n < s.value_heads; n += blockDim.x) {
            const int at = t * s.value_heads + n;
            s.beta[at] = sigmoid(s.b[at]);
            s.g[at] = log_decay_of(s.a[at], s.dt_bias[n], s.log_decay[n]);
        }
        return;
    }
    if (head >= 2 * s.key_heads) {
        const int n = head - 2 * s.key_heads;
        for (int i = threadIdx.x; i < s.value_width; i += blockDim.x)
            s.v[(static_cast<long long>(t) * s.value_heads + n) * s.value_width + i] =
                convolve(s.qkv, s.tail, s.conv, channels, s.taps, t, 2 * keys + n * s.value_width + i);
        return;
    }
    for (int i = threadIdx.x; i < s.key_width; i += blockDim.x)
        values[i] = convolve(s.qkv, s.tail, s.conv, channels, s.taps, t, head * s.key_width + i);
    __syncthreads();
    const float inverse = inverse_length(dot_vectors(values, values, s.key_width));
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

// Grid (tiles of 32 columns, N), 128 threads. Shared memory: (8 + 2 T) x 4 kSlice floats of keys and queries.
template <int kSlice>
__device__ void run_state(const Inputs& inputs, const StateShape& s, float* vectors) {
    __shared__ float sums[4 * kThreads];
    constexpr int kWide = kSlice * kWarps;
    const Tile tile(s.state, s.key_width, s.value_width, kSlice);
    const int n = tile.n, group = n / (s.value_heads / s.key_heads);
    float state[kSlice];
    device::wait_for_previous();
    tile.load(state);
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
    for (int t = 0; t < folded + s.rows; ++t) {
        if (t == folded && folded > 0) tile.store(state);
        const bool is_pending = t < folded;
        const DeltaRows& rows = is_pending ? s.pending : s.now;
        const int row = is_pending ? t : t - folded, at = row * s.value_heads + n;
        const float v = tile.is_inside ? rows.v[at * s.value_width + tile.column] : 0.0f;
        const float y = delta_row<kSlice>(state, (is_pending ? vectors : now) + row * kWide,
                                          is_pending ? nullptr : queries + row * kWide, v, rows.beta[at],
                                          expf(rows.g[at]), sums + (t & 1) * 2 * kThreads, t + 1 < folded + s.rows);
        if (!is_pending) tile.put(s.out, row, s.value_heads, y);
    }
}

#define STRATA_GATED_DELTA(SLICE)                                                                              \
    extern "C" __global__ void __launch_bounds__(128) gated_delta_##SLICE(Inputs inputs, const StateShape s) { \
        extern __shared__ float4 vectors[];                                                                    \
        run_state<SLICE>(inputs, s, reinterpret_cast<float*>(vectors));                                        \
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
    float sum = 0.0f;  // a lane's columns are four neighbours in every 128, as where linear.cu does it while it reads
    for (int first = lane * 4; first < width; first += 128)
        for (int i = first; i < first + 4 && i < width; ++i) sum = fused(o[at + i], o[at + i], sum);
    const float inverse = inverse_root(warp_sum(sum) / static_cast<float>(width) + eps);
    if (row < count)
        for (int i = lane; i < width; i += 32)
            y[at + i] = o[at + i] * inverse * weight[i] * (is_silu ? silu(z[at + i]) : sigmoid(z[at + i]));
}
