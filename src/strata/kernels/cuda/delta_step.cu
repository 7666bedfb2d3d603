// A layer of the gated delta net in one launch: everything but its products and its norm.
//
// Bound by the state, N x D x V x 4 bytes read, and written when rows are folded (3.1 MB each way for 48 x 128 x 128:
// 0.8 us at 4.1 TB/s), and by latency: so what does not depend on the launches before is read, and folded, before them.
// Heads of 128 x 128 have a kernel of their own, which does the gated norm too (delta_head.h); the others any shape.
#include "delta.h"
#include "delta_head.h"
#include "device.h"
#include "parts.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

// What rounds of a layer keep for the next, two copies each: a round reads copy `turn` and writes the other, so that no
// block waits for another to have read. `z`: the U rows before a window, then its own, of all channels.
struct DeltaKept {
    float *z, *k, *v, *beta, *g;
    const int* turn;
};

struct DeltaStep {
    DeltaShape in;  // without q to g, which stay in the block, and without the tail, which is kept
    DeltaKept kept;
    float *state, *out;
};

constexpr int kRoom = 4 * kThreads + 4 * kMaxWindow + 4;
constexpr int kStepThreads = kThreads + 32;  // the last warp has no state: values, gates, what is to be folded

// A line of a block is a row of what it needs of a window: its key head's queries and keys (kWide each, zeros past
// their width), its columns of values. A thread has its own elements of every line, and reads no others before the
// barrier that follows the convolution: of queries and keys i, i + kThreads, .. as in `delta_inputs`; values are the
// last warp's.
template <int kSlice>
struct Line {
    static constexpr int kWide = kSlice * kWarps, kLength = 2 * kWide + kColumns;
    static constexpr int kSlots = 2 * kWide > kThreads ? 2 * kWide / kThreads : 1;

    int elements[kSlots], channels[kSlots];  // of a line, of qkv; -1: none, and zeros

    __device__ __forceinline__ Line(const DeltaShape& in, int n, int group) {
        const int column = blockIdx.x * kColumns + (threadIdx.x & 31);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            const int i = threadIdx.x + slot * kThreads, d = i % kWide;
            elements[slot] = channels[slot] = -1;
            if (threadIdx.x < kThreads && i < 2 * kWide) {
                elements[slot] = i;
                if (d < in.key_width) channels[slot] = (i / kWide * in.key_heads + group) * in.key_width + d;
            } else if (threadIdx.x >= kThreads && slot == 0) {
                elements[slot] = 2 * kWide + (threadIdx.x & 31);
                if (column < in.value_width)
                    channels[slot] = 2 * in.key_heads * in.key_width + n * in.value_width + column;
            }
        }
    }

    // `rows` lines from `to` on, kBatch of them read at once; `read(row, slot)` where there is a channel.
    template <int kBatch, class Read>
    __device__ __forceinline__ void stage(float* to, int rows, Read read) const {
        for (int first = 0; first < rows; first += kBatch) {
            float values[kBatch][kSlots];
#pragma unroll
            for (int r = 0; r < kBatch; ++r)
#pragma unroll
                for (int slot = 0; slot < kSlots; ++slot)
                    values[r][slot] = first + r < rows && channels[slot] >= 0 ? read(first + r, slot) : 0.0f;
#pragma unroll
            for (int r = 0; r < kBatch; ++r)
#pragma unroll
                for (int slot = 0; slot < kSlots; ++slot)
                    if (first + r < rows && elements[slot] >= 0)
                        to[(first + r) * kLength + elements[slot]] = values[r][slot];
        }
    }

    // The other way: `write(row, slot, value)`.
    template <int kBatch, class Write>
    __device__ __forceinline__ void keep(const float* from, int rows, Write write) const {
        for (int first = 0; first < rows; first += kBatch) {
            float values[kBatch][kSlots];
#pragma unroll
            for (int r = 0; r < kBatch; ++r)
#pragma unroll
                for (int slot = 0; slot < kSlots; ++slot)
                    if (first + r < rows && channels[slot] >= 0)
                        values[r][slot] = from[(first + r) * kLength + elements[slot]];
#pragma unroll
            for (int r = 0; r < kBatch; ++r)
#pragma unroll
                for (int slot = 0; slot < kSlots; ++slot)
                    if (first + r < rows && channels[slot] >= 0) write(first + r, slot, values[r][slot]);
        }
    }

    // silu of the convolution of the lines from `lines` on, in this thread's elements; `weights`: a line a tap.
    __device__ __forceinline__ void convolve(const float* lines, const float* weights, int taps,
                                             float (&values)[kSlots]) const {
        constexpr int kAhead = 4;
        float x[kSlots][kAhead], weight[kSlots][kAhead];
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot)
#pragma unroll
            for (int w = 0; w < kAhead; ++w) {
                const bool is_there = w < taps && elements[slot] >= 0;
                x[slot][w] = is_there ? lines[w * kLength + elements[slot]] : 0.0f;
                weight[slot][w] = is_there ? weights[w * kLength + elements[slot]] : 0.0f;
            }
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            float sum = weight[slot][0] * x[slot][0];
#pragma unroll
            for (int w = 1; w < kAhead; ++w)
                if (w < taps) sum = fused(weight[slot][w], x[slot][w], sum);
            if (elements[slot] >= 0)
                for (int w = kAhead; w < taps; ++w)
                    sum = fused(weights[w * kLength + elements[slot]], lines[w * kLength + elements[slot]], sum);
            values[slot] = silu(sum);
        }
    }
};

// Everything of a layer but its products and its norm: q, k, v and gates of T rows, the fold of the rows accepted
// before, the recurrence, and what the next round folds. Grid (tiles of 32 columns, N), kStepThreads. Shared memory:
// (taps + 8 + U + T) lines and kRoom floats.
//
// How many rows to fold, and which copy holds them, is read before the launches before this one are complete: only the
// round's first launch writes these words, so they are nearly always there. What was made of them (the fold in
// registers, lines in shared memory) is thrown away where they turn out to be others, which is seen after the wait.
template <int kSlice>
__device__ void step(const Inputs& inputs, const DeltaStep& s, float* weights) {
    using Lines = Line<kSlice>;
    constexpr int kWide = Lines::kWide, kLength = Lines::kLength, kSlots = Lines::kSlots;
    device::let_next_start();
    const DeltaShape& in = s.in;
    const DeltaKept& kept = s.kept;
    const Tile tile(s.state, in.key_width, in.value_width, kSlice);
    const int n = tile.n, ratio = in.value_heads / in.key_heads, group = n / ratio, before = in.taps - 1;
    const int keys = in.key_heads * in.key_width, channels = 2 * keys + in.value_heads * in.value_width;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool is_holder = warp < kWarps;
    const Lines line(in, n, group);
    float* z = weights + (in.taps + kMaxWindow) * kLength;  // U + T lines; what is folded ends where they begin
    float *sums = z + (before + in.rows) * kLength, *betas = sums + 4 * kThreads;
    float* decays = betas + 2 * kMaxWindow;  // the window's, then those of what is folded
    int* words = reinterpret_cast<int*>(decays + 2 * kMaxWindow);
    float state[kSlice], fresh[kSlots], b = 0.0f, a = 0.0f;
    int accepted = 0, copy = 0, folded, turn;
    if (threadIdx.x == kThreads) accepted = word(inputs.accepted), copy = word(kept.turn);
    if (is_holder) tile.load(state);
    const float dt_bias = in.dt_bias[n], log_decay = in.log_decay[n];
    line.template stage<4>(weights, in.taps,
                           [&](int w, int slot) { return in.conv[line.channels[slot] * in.taps + w]; });
    while (true) {
        if (threadIdx.x == kThreads) words[0] = accepted, words[1] = copy;
        __syncthreads();
        accepted = words[0], copy = words[1];
        folded = max(0, min(accepted, kMaxWindow)), turn = copy & 1;
        if (!is_holder && lane < folded) {
            const int at = (turn * kMaxWindow + lane) * in.value_heads + n;
            betas[kMaxWindow + lane] = kept.beta[at];
            decays[kMaxWindow + lane] = expf(kept.g[at]);
        }
        line.template stage<4>(z - folded * kLength, folded + before, [&](int row, int slot) {
            if (row >= folded)  // the tail is U rows from row `folded` on of what is kept
                return kept.z[(turn * (before + kMaxWindow) + row) * channels + line.channels[slot]];
            const int at = turn * kMaxWindow + row;
            if (!is_holder) return kept.v[at * (channels - 2 * keys) + line.channels[slot] - 2 * keys];
            return line.elements[slot] >= kWide ? kept.k[at * keys + line.channels[slot] - keys] : 0.0f;
        });
        __syncthreads();
        for (int t = 0; t < folded; ++t) {
            const float* row = z + (t - folded) * kLength;
            delta_row<kSlice>(state, row + kWide, nullptr, row[2 * kWide + lane], betas[kMaxWindow + t],
                              decays[kMaxWindow + t], sums + (t & 1) * 2 * kThreads, true);
        }
        device::wait_for_previous();
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot)
            fresh[slot] = line.channels[slot] >= 0 ? in.qkv[line.channels[slot]] : 0.0f;
        if (!is_holder && lane < in.rows) b = in.b[lane * in.value_heads + n], a = in.a[lane * in.value_heads + n];
        const int accepted_now = word(inputs.accepted), copy_now = word(kept.turn);
        if (accepted == accepted_now && copy == copy_now) break;
        accepted = accepted_now, copy = copy_now;
        if (is_holder) tile.load(state);
    }

    const int next = (turn ^ 1) * kMaxWindow;  // rows before the other copy, and in `z`
    const int next_z = (turn ^ 1) * (before + kMaxWindow);
    const bool is_keeper = blockIdx.x == 0 && n % ratio == 0;  // of its key head; of its columns every block is
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot)
        if (line.elements[slot] >= 0) z[before * kLength + line.elements[slot]] = fresh[slot];
    if (in.rows > 1)
        line.template stage<kMaxWindow - 1>(z + in.taps * kLength, in.rows - 1, [&](int row, int slot) {
            return in.qkv[(row + 1) * channels + line.channels[slot]];
        });
    if (is_keeper || !is_holder)
        line.template keep<4>(z, before + in.rows, [&](int row, int slot, float value) {
            kept.z[(next_z + row) * channels + line.channels[slot]] = value;
        });
    for (int t = 0; t < in.rows; ++t) {
        float* row = z + t * kLength;  // the result takes the place of a line that no later row reads
        float values[kSlots];
        line.convolve(row, weights, in.taps, values);
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot)
            if (line.elements[slot] >= 0) row[line.elements[slot]] = values[slot];
    }
    __syncthreads();
    if (!is_holder) {
        line.template keep<4>(z, in.rows, [&](int t, int slot, float value) {
            kept.v[(next + t) * (channels - 2 * keys) + line.channels[slot] - 2 * keys] = value;
        });
        if (lane < in.rows) {
            const float beta = sigmoid(b), g = log_decay_of(a, dt_bias, log_decay);
            betas[lane] = beta, decays[lane] = expf(g);
            if (blockIdx.x == 0)
                kept.beta[(next + lane) * in.value_heads + n] = beta, kept.g[(next + lane) * in.value_heads + n] = g;
        }
    } else {
        if (folded > 0) tile.store(state);
        for (int vector = warp; vector < 2 * in.rows; vector += kWarps) {  // queries, keys of a row
            const int t = vector >> 1, is_key = vector & 1;
            float* values = z + t * kLength + is_key * kWide;
            const float inverse = inverse_length(dot_vectors(values, values, kWide));
            for (int d = lane; d < kWide; d += 32) {
                const float value = values[d] * inverse;
                values[d] = is_key ? value : value * in.scale;
                if (is_keeper && is_key && d < in.key_width)
                    kept.k[(next + t) * keys + group * in.key_width + d] = value;
            }
        }
    }
    __syncthreads();
    for (int t = 0; t < in.rows; ++t) {
        const float* row = z + t * kLength;
        const float y = delta_row<kSlice>(state, row + kWide, row, row[2 * kWide + lane], betas[t], decays[t],
                                          sums + ((folded + t) & 1) * 2 * kThreads, t + 1 < in.rows);
        tile.put(s.out, t, in.value_heads, y);
    }
}

#define STRATA_DELTA_STEP(SLICE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(kStepThreads) delta_step_##SLICE(Inputs inputs, const DeltaStep s) { \
        extern __shared__ float4 room[];                                                                              \
        step<SLICE>(inputs, s, reinterpret_cast<float*>(room));                                                       \
    }

#if STRATA_IN(1)
STRATA_DELTA_STEP(64)
#endif
#if STRATA_IN(0)
STRATA_DELTA_STEP(8)
STRATA_DELTA_STEP(32)

extern "C" __global__ void __launch_bounds__(kHeadThreads, 1)
    delta_step_head(Inputs inputs, const HeadStep s, const device::Ahead ahead) {
    extern __shared__ float4 room[];
    head_step(inputs, s, ahead, room);
}
#endif
