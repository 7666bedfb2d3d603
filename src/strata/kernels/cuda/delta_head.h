// A layer of the gated delta net in one launch, a block a value head of 128 x 128: delta_step.cu's law and its bits,
// and the gated norm of what a row's query finds.
//
// Few blocks of many warps: bound by how many instructions a warp executes, one after another. So a thread holds 8 rows
// of 4 neighbouring columns of the state, everything is read 16 bytes at once at offsets that are constants, a warp
// makes a whole vector (a row's queries, keys, values or output), and the state does not move for a window's last row.
#pragma once
#include "delta.h"
#include "device.h"
#include "rows.h"

namespace strata {
namespace rows {

struct HeadStep {
    const float *qkv, *conv, *b, *a, *log_decay, *dt_bias, *z, *weight;  // z, weight: of the norm; null: not normed
    float *state, *out, *kept_z, *kept_k, *kept_v, *kept_beta, *kept_g;  // kept: two copies each, as in DeltaKept
    const int* turn;
    int rows, key_heads;
    float scale, eps;  // of queries, of the norm
    int is_silu, unused;
};

constexpr int kWidth = 128, kTaps = 4, kBefore = kTaps - 1, kHolders = 16, kHeadThreads = 32 * kHolders;
enum Vector { kQuery, kKey, kValue, kGate, kVectors };

struct HeadRoom {
    float4 conv[3][kTaps][32];             // of a lane's channel c the taps: [vector][c][lane]
    float before[kBefore][3][kWidth];
    float pending[kMaxWindow][2][kWidth];  // keys, values
    float sums[2][2][4][kWidth];           // of keys, of queries: of a quarter of the state's rows each
    float weight[kWidth];
    float betas[2][kMaxWindow], decays[2][kMaxWindow];  // of the window, of what is folded
    int words[4];
};

__device__ __forceinline__ float4& four(float* vector, int f) { return reinterpret_cast<float4*>(vector)[f]; }
__device__ __forceinline__ float4 four(const float* vector, int f) {
    return reinterpret_cast<const float4*>(vector)[f];
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// `dot_vectors` of what lanes hold: columns 4 * lane ..
__device__ __forceinline__ float dot_lanes(const float4& x, const float4& y) {
    return warp_sum(fused(x.w, y.w, fused(x.z, y.z, fused(x.y, y.y, fused(x.x, y.x, 0.0f)))));
}

// Warp (quarter, part), lane (group, four): rows quarter * 32 + group * 8 .., columns part * 32 + four * 4 ..
struct Patch {
    float4 of[8];
    int row, column;
    float4* place;

    __device__ __forceinline__ Patch(float* state, int n) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        row = (warp >> 2) * 32 + (lane >> 3) * 8, column = (warp & 3) * 32 + (lane & 7) * 4;
        place = reinterpret_cast<float4*>(state + static_cast<size_t>(n) * kWidth * kWidth + row * kWidth + column);
    }

    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] = place[i * (kWidth / 4)];
    }

    __device__ __forceinline__ void store() const {
#pragma unroll
        for (int i = 0; i < 8; ++i) place[i * (kWidth / 4)] = of[i];
    }

    // The sums of a lane's 8 rows.
    __device__ __forceinline__ float4 dot(const float4& low, const float4& high) const {
        const float k[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum.x = fused(k[i], of[i].x, sum.x), sum.y = fused(k[i], of[i].y, sum.y);
            sum.z = fused(k[i], of[i].z, sum.z), sum.w = fused(k[i], of[i].w, sum.w);
        }
        return sum;
    }

    // The quarter's sum of one column a lane into `sums` [4, kWidth]. Lanes swap halves of what they have, so that all
    // four groups' sums take three steps: the first group's and the third's, the second's and the fourth's, and both.
    __device__ __forceinline__ void put(const float4& sum, float* sums) const {
        const bool is_upper = (threadIdx.x & 16) != 0, is_odd = (threadIdx.x & 8) != 0;
        float first = is_upper ? sum.z : sum.x, second = is_upper ? sum.w : sum.y;
        first += __shfl_xor_sync(kAll, is_upper ? sum.x : sum.z, 16);
        second += __shfl_xor_sync(kAll, is_upper ? sum.y : sum.w, 16);
        const float other = __shfl_xor_sync(kAll, is_odd ? first : second, 8);
        sums[(threadIdx.x >> 7) * kWidth + column + (is_upper ? 2 : 0) + (is_odd ? 1 : 0)] =
            (is_odd ? second : first) + other;
    }

    __device__ __forceinline__ void move(const float4& low, const float4& high, const float4& change, float decay) {
        const float k[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            of[i].x = fused(k[i], change.x, of[i].x * decay), of[i].y = fused(k[i], change.y, of[i].y * decay);
            of[i].z = fused(k[i], change.z, of[i].z * decay), of[i].w = fused(k[i], change.w, of[i].w * decay);
        }
    }
};

// Four columns of [4, kWidth] sums, quarters rising.
__device__ __forceinline__ float4 found_at(const float* sums, int f) {
    return add(add(add(four(sums, f), four(sums + kWidth, f)), four(sums + 2 * kWidth, f)), four(sums + 3 * kWidth, f));
}

__device__ __forceinline__ float4 change_at(const float* sums, const float* values, int f, float beta, float decay) {
    const float4 found = found_at(sums, f), v = four(values, f);
    return make_float4(change_of(v.x, found.x, beta, decay), change_of(v.y, found.y, beta, decay),
                       change_of(v.z, found.z, beta, decay), change_of(v.w, found.w, beta, decay));
}

// What a row's query finds, four columns a lane of one warp; `sums`: of the row's keys and queries, `both`: query times
// key.
__device__ __forceinline__ float4 result_at(const float* row, const float* sums, int lane, float both, float beta,
                                            float decay) {
    const float4 change = change_at(sums, row + kValue * kWidth, lane, beta, decay);
    const float4 found = found_at(sums + 4 * kWidth, lane);
    return make_float4(result_of(found.x, decay, both, change.x), result_of(found.y, decay, both, change.y),
                       result_of(found.z, decay, both, change.z), result_of(found.w, decay, both, change.w));
}

__device__ __forceinline__ float convolve(const float4& weight, float a, float b, float c, float d) {
    return fused(weight.w, d, fused(weight.z, c, fused(weight.y, b, weight.x * a)));
}

// The exponentials first: a division ends what the compiler interleaves.
__device__ __forceinline__ float4 silu(const float4& x) {
    const float a = 1.0f + expf(-x.x), b = 1.0f + expf(-x.y), c = 1.0f + expf(-x.z), d = 1.0f + expf(-x.w);
    return make_float4(x.x / a, x.y / b, x.z / c, x.w / d);
}

__device__ __forceinline__ float4 sigmoid(const float4& x) {
    const float a = 1.0f + expf(-x.x), b = 1.0f + expf(-x.y), c = 1.0f + expf(-x.z), d = 1.0f + expf(-x.w);
    return make_float4(1.0f / a, 1.0f / b, 1.0f / c, 1.0f / d);
}

// Where the vectors of a head lie in a row of qkv, and of what is kept of it.
struct Place {
    int group, n, heads, keys, values, channels;  // keys, values: columns of all key heads, of all value heads

    __device__ __forceinline__ explicit Place(const HeadStep& s)
        : group(blockIdx.y), n(blockIdx.y * gridDim.x + blockIdx.x), heads(s.key_heads * gridDim.x),
          keys(s.key_heads * kWidth), values(heads * kWidth), channels(2 * keys + values) {}

    __device__ __forceinline__ int channel(int vector) const {
        return vector == kValue ? 2 * keys + n * kWidth : vector * keys + group * kWidth;
    }
};

// Before the launches before this one are complete: the rows to fold and those before the window into shared memory.
__device__ __forceinline__ void stage_kept(const HeadStep& s, const Place& at, HeadRoom& room, int role, int folded,
                                           int turn) {
    const int lane = threadIdx.x & 31, first = turn * kMaxWindow;
    if (role < 3) {
        const float* z = s.kept_z + (turn * (kBefore + kMaxWindow) + folded) * at.channels + at.channel(role);
        float4 rows[kBefore];
#pragma unroll
        for (int i = 0; i < kBefore; ++i) rows[i] = four(z + i * at.channels, lane);
#pragma unroll
        for (int i = 0; i < kBefore; ++i) four(room.before[i][role], lane) = rows[i];
    } else if (role == 3 && lane < folded) {
        const int from = (first + lane) * at.heads + at.n;
        const float beta = s.kept_beta[from], g = s.kept_g[from];
        room.betas[1][lane] = beta, room.decays[1][lane] = expf(g);
    }
    const int i = kHolders - 1 - role;  // a warp each: kHolders are 2 kMaxWindow
    if (i < 2 * folded) {
        const int row = first + (i >> 1), is_value = i & 1;
        const float* from = is_value != 0 ? s.kept_v + row * at.values + at.n * kWidth
                                          : s.kept_k + row * at.keys + at.group * kWidth;
        four(room.pending[i >> 1][is_value], lane) = four(from, lane);
    }
}

// The inputs of the convolution of one vector of row t: rows t - 3 to t, the last of them at `own` of qkv.
__device__ __forceinline__ void read_inputs(const HeadStep& s, const HeadRoom& room, int own, int channels, int t,
                                            int vector, float4 (&x)[kTaps]) {
    x[kBefore] = four(s.qkv + own, 0);
#pragma unroll
    for (int i = 0; i < kBefore; ++i)
        x[i] = t + i < kBefore ? four(room.before[t + i][vector], threadIdx.x & 31)
                               : four(s.qkv + own + (i - kBefore) * channels, 0);
}

// One vector of row t from the convolution's inputs, into `row`.
__device__ __forceinline__ void make_vector(const HeadStep& s, const HeadRoom& room, int vector,
                                            const float4 (&x)[kTaps], float* row) {
    const int lane = threadIdx.x & 31;
    const float4* weight = &room.conv[vector][0][lane];
    float4 y = silu(make_float4(convolve(weight[0], x[0].x, x[1].x, x[2].x, x[3].x),
                                convolve(weight[32], x[0].y, x[1].y, x[2].y, x[3].y),
                                convolve(weight[64], x[0].z, x[1].z, x[2].z, x[3].z),
                                convolve(weight[96], x[0].w, x[1].w, x[2].w, x[3].w)));
    if (vector != kValue) {
        const float inverse = inverse_length(dot_lanes(y, y));
        y = make_float4(y.x * inverse, y.y * inverse, y.z * inverse, y.w * inverse);
        if (vector == kQuery) y = make_float4(y.x * s.scale, y.y * s.scale, y.z * s.scale, y.w * s.scale);
    }
    four(row + vector * kWidth, lane) = y;
}

// What the next round reads of a vector: the convolution's last input `own` (and the rows before the first), keys and
// values. Of what heads share the first one keeps it.
__device__ __forceinline__ void keep_vector(const HeadStep& s, const Place& at, const HeadRoom& room, int t, int vector,
                                            const float4& own, int next, const float* row) {
    const int lane = threadIdx.x & 31, kept_row = next * kMaxWindow + t;
    if (vector != kValue && blockIdx.x != 0) return;
    float* z = s.kept_z + (next * (kBefore + kMaxWindow) + t) * at.channels + at.channel(vector);
    four(z + kBefore * at.channels, lane) = own;
    if (t == 0)
#pragma unroll
        for (int i = 0; i < kBefore; ++i) four(z + i * at.channels, lane) = four(room.before[i][vector], lane);
    if (vector == kQuery) return;
    float* to = vector == kKey ? s.kept_k + kept_row * at.keys + at.group * kWidth
                               : s.kept_v + kept_row * at.values + at.n * kWidth;
    four(to, lane) = four(row + vector * kWidth, lane);
}

// The gated norm, delta.cu's operations in its order.
__device__ __forceinline__ float4 normed(const float4& o, const float4& weight, const float4& gate, float eps) {
    const float inverse = inverse_root(dot_lanes(o, o) / static_cast<float>(kWidth) + eps);
    return make_float4(o.x * inverse * weight.x * gate.x, o.y * inverse * weight.y * gate.y,
                       o.z * inverse * weight.z * gate.z, o.w * inverse * weight.w * gate.w);
}

// A window's rows on the state, one after the other. Returns what the query of row `mine` finds, to one warp; `late`:
// the state is stored before it moves, else that was done.
__device__ __forceinline__ float4 walk(Patch& patch, HeadRoom& room, const float* rows, int count, int folded, int mine,
                                       bool late) {
    const int lane = threadIdx.x & 31;
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float both = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const float* row = rows + i * kVectors * kWidth;
        float* sums = room.sums[(folded + i) & 1][0][0];
        const float *k = row + kKey * kWidth + patch.row, *q = row + kQuery * kWidth + patch.row;
        const float4 low = four(k, 0), high = four(k, 1);
        const float4 of_key = patch.dot(low, high), of_query = patch.dot(four(q, 0), four(q, 1));
        patch.put(of_key, sums);
        patch.put(of_query, sums + 4 * kWidth);
        if (i == mine) both = dot_lanes(four(row + kQuery * kWidth, lane), four(row + kKey * kWidth, lane));
        if (i == 0 && late) patch.store();
        __syncthreads();
        const float beta = room.betas[0][i], decay = room.decays[0][i];
        if (i == mine) y = result_at(row, sums, lane, both, beta, decay);
        if (i + 1 < count)
            patch.move(low, high, change_at(sums, row + kValue * kWidth, patch.column / 4, beta, decay), decay);
    }
    return y;
}

// The rows to fold, which are staged. The state is not stored: it may be the wrong one.
__device__ __forceinline__ void fold(Patch& patch, HeadRoom& room, int folded) {
#pragma unroll 1
    for (int i = 0; i < folded; ++i) {
        const float *k = room.pending[i][0] + patch.row, *v = room.pending[i][1];
        const float4 low = four(k, 0), high = four(k, 1);
        float* sums = room.sums[i & 1][0][0];
        patch.put(patch.dot(low, high), sums);
        __syncthreads();
        const float beta = room.betas[1][i], decay = room.decays[1][i];
        patch.move(low, high, change_at(sums, v, patch.column / 4, beta, decay), decay);
    }
}

// Grid (value heads of a key head, key heads and more), kHeadThreads; blocks past the heads only bring weights. Shared
// memory: a HeadRoom and T x kVectors vectors. What is read before the wait may be thrown away: see `step`.
__device__ void head_step(const Inputs& inputs, const HeadStep& s, const device::Ahead& ahead, float4* memory) {
    device::let_next_start();
    const int lane = threadIdx.x & 31;
    const int role = (threadIdx.x / 32 + kHolders - 1) % kHolders;  // warp 0, which brings, has the last
    if (static_cast<int>(blockIdx.y) >= s.key_heads) {
        device::bring(ahead);
        device::wait_for_previous();
        return;
    }
    const Place at(s);
    HeadRoom& room = *reinterpret_cast<HeadRoom*>(memory);
    float* rows = reinterpret_cast<float*>(&room + 1);
    Patch patch(s.state, at.n);
    int accepted = 0, copy = 0, folded, turn;
    if (threadIdx.x == kHeadThreads - 32) accepted = word(inputs.accepted), copy = word(s.turn);
    patch.load();
    float4 weight[kTaps];
    float dt_bias = 0.0f, log_decay = 0.0f, a = 0.0f, b = 0.0f, beta_now = 0.0f, g = 0.0f;
    if (role < 3) {
        const float* taps = s.conv + (at.channel(role) + lane * 4) * kTaps;
#pragma unroll
        for (int c = 0; c < 4; ++c) weight[c] = four(taps, c);
    } else if (role == 3) {
        dt_bias = s.dt_bias[at.n], log_decay = s.log_decay[at.n];
        if (s.weight != nullptr) weight[0] = four(s.weight, lane);
    }
    device::bring(ahead);
    const int mine = kHolders - 2 - role;  // the row that this warp finishes
    const bool is_finisher = mine >= 0 && mine < s.rows;
    const int t = role / 3, vector = role % 3;  // the vector that this warp makes
    const int fours = lane * 4;
    int own = t * at.channels + at.channel(vector) + fours, gate = (mine * at.heads + at.n) * kWidth + fours;
    int gates = min(lane, s.rows - 1) * at.heads + at.n;
    const bool is_early = role >= 4 && role >= 3 * s.rows;  // nothing is made here that others wait for
    float4 x[kTaps], z = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (threadIdx.x == kHeadThreads - 32) room.words[0] = accepted, room.words[1] = copy;
    __syncthreads();
    accepted = room.words[0], copy = room.words[1];
    if (role < 3)
#pragma unroll
        for (int c = 0; c < 4; ++c) room.conv[role][c][lane] = weight[c];
    else if (role == 3 && s.weight != nullptr)
        four(room.weight, lane) = weight[0];
    while (true) {
        folded = max(0, min(accepted, kMaxWindow)), turn = copy & 1;
        stage_kept(s, at, room, role, folded, turn);
        __syncthreads();
        fold(patch, room, folded);
        own = device::held(own), gate = device::held(gate), gates = device::held(gates);
        device::wait_for_previous();
        if (t < s.rows) read_inputs(s, room, own, at.channels, t, vector, x);
        if (is_finisher && s.weight != nullptr) z = four(s.z + gate, 0);
        if (role == 3) b = s.b[gates], a = s.a[gates];
        bool is_same = true;
        if (role >= 4) {
            const int accepted_now = word(inputs.accepted), copy_now = word(s.turn);
            is_same = accepted == accepted_now && copy == copy_now;
            if (threadIdx.x == kHeadThreads - 32) room.words[0] = accepted_now, room.words[1] = copy_now;
            if (is_same && is_early && folded > 0) patch.store();
        }
#pragma unroll 1
        for (int i = role; i < 3 * s.rows; i += kHolders) {
            const int row = i / 3, which = i % 3;
            if (i != role)
                read_inputs(s, room, row * at.channels + at.channel(which) + fours, at.channels, row, which, x);
            make_vector(s, room, which, x, rows + row * kVectors * kWidth);
        }
        if (is_finisher && s.weight != nullptr)
            four(rows + (mine * kVectors + kGate) * kWidth, lane) = s.is_silu != 0 ? silu(z) : sigmoid(z);
        if (role == 3 && lane < s.rows) {
            g = log_decay_of(a, dt_bias, log_decay), beta_now = sigmoid(b);
            room.decays[0][lane] = expf(g), room.betas[0][lane] = beta_now;
        }
        if (__syncthreads_or(!is_same) == 0) break;
        accepted = room.words[0], copy = room.words[1];
        patch.load();
    }

    const int next = turn ^ 1;
    float4 y = walk(patch, room, rows, s.rows, folded, mine, folded > 0 && !is_early);
#pragma unroll 1
    for (int i = role; i < 3 * s.rows; i += kHolders) {
        const int row = i / 3, which = i % 3;
        if (3 * s.rows > kHolders) x[kBefore] = four(s.qkv + row * at.channels + at.channel(which), lane);
        keep_vector(s, at, room, row, which, x[kBefore], next, rows + row * kVectors * kWidth);
    }
    if (role == 3 && lane < s.rows) {
        const int to = (next * kMaxWindow + lane) * at.heads + at.n;
        s.kept_beta[to] = beta_now, s.kept_g[to] = g;
    }
    if (!is_finisher) return;
    if (s.weight != nullptr)
        y = normed(y, four(room.weight, lane), four(rows + (mine * kVectors + kGate) * kWidth, lane), s.eps);
    four(s.out + (mine * at.heads + at.n) * kWidth, lane) = y;
}

}  // namespace rows
}  // namespace strata
