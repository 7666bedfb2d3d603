// What an attention layer does with a window's rows before it attends, in one launch: norms and rotation of heads, keys
// and values and raw index keys to their caches, and the keys of the blocks that these rows may complete.
//
// A warp a head of a row, or a block. Everything is read at once; bytes are those of a few rows of activations, so the
// launch and one trip to memory are what it takes.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

constexpr int kParts = 8, kWidest = 256, kOwn = kWidest / 32, kWarps = 4;
constexpr int kMembersAtOnce = 4;  // of a block, that are under way at once

// Heads of T x N x D, `pitch` floats apart: with a weight y = rope(rms_norm(x)), without one they are copied.
struct Part {
    const float *x, *weight;
    float* y;     // T x N x D, or null
    void* cache;  // P x N x D, whose rows from the committed position on are written, or null
    int heads, head_pitch, row_pitch, first;  // first: heads of the parts before this one
    int width, is_bf16;
    float eps, plus;  // the norm is times plus + weight
};

struct Parts {
    Part of[kParts];
    const float *cosines, *sines;  // T x half
    int count, heads, rows, half;
};

// Candidate c is block position / members + c: the mean of its raw keys, normed and rotated, is written when the window
// completes it. `before` null: candidate c is members rows of `rows` from row c x members on, all there.
struct Blocks {
    const float *rows, *before;  // raw keys of the window, T x D, and of every position, P x D
    float* keys;                 // B x D
    const float *weight, *cosines, *sines;  // cosines of candidates, C x half
    int count, members, width, half;
    float eps;
    int unused;
};

// The nearest BF16, ties to even; NaN stays NaN.
__device__ __forceinline__ unsigned short to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<unsigned short>(bits >> 16 | 0x40u);
    return static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// A lane's columns lane, lane + 32, ... of a row; zeros past the width.
__device__ __forceinline__ void load_own(const float* row, int width, float* own) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = i * 32 + lane < width ? row[i * 32 + lane] : 0.0f;
}

// Cosines or sines of a lane's columns: columns d and d + half share one.
__device__ __forceinline__ void load_angles(const float* row, int half, float* own) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int d = i * 32 + lane;
        own[i] = d < 2 * half ? row[d < half ? d : d - half] : 0.0f;
    }
}

// own = rope(rms_norm(own)) of a row of `width` columns, halves [0, half) and [half, 2 half) rotated. By a warp; `room`
// holds a row. The sum runs over a lane's columns rising, then through the warp's tree.
__device__ __forceinline__ void norm_and_rotate(float* own, const float* weight, float plus, float eps, int width,
                                                const float* cosines, const float* sines, int half, float* room) {
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (i * 32 + lane < width) sum = fused(own[i], own[i], sum);
    const float inverse = inverse_root(warp_sum(sum) / static_cast<float>(width) + eps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        own[i] = own[i] * inverse * (plus + weight[i]);
        room[i * 32 + lane] = own[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int d = i * 32 + lane, other = d < half ? d + half : d < 2 * half ? d - half : d;
        const float crossed = room[other] * sines[i], turned = fused(own[i], cosines[i], d < half ? -crossed : crossed);
        own[i] = d < 2 * half ? turned : own[i];
    }
}

__device__ __forceinline__ void write_head(const Part& part, int t, int head, int start, const float* own) {
    const int lane = threadIdx.x & 31;
    if (part.y != nullptr) {
        float* y = part.y + (static_cast<long long>(t) * part.heads + head) * part.width + lane;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i * 32 + lane < part.width) y[i * 32] = own[i];
    }
    if (part.cache == nullptr) return;
    const long long to = (static_cast<long long>(start + t) * part.heads + head) * part.width + lane;
    if (part.is_bf16) {
        unsigned short* cache = static_cast<unsigned short*>(part.cache) + to;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i * 32 + lane < part.width) cache[i * 32] = to_bf16(own[i]);
    } else {
        float* cache = static_cast<float*>(part.cache) + to;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i * 32 + lane < part.width) cache[i * 32] = own[i];
    }
}

__device__ __forceinline__ void do_head(const Parts& parts, int t, int n, const int* position, float* room) {
    const int lane = threadIdx.x & 31;
    int which = 0;
    while (which + 1 < parts.count && n >= parts.of[which + 1].first) ++which;
    const Part& part = parts.of[which];
    const int head = n - part.first;
    float own[kOwn], weight[kOwn];
    if (part.weight != nullptr) load_own(part.weight, part.width, weight);
    device::wait_for_previous();
    load_own(part.x + static_cast<long long>(t) * part.row_pitch + head * part.head_pitch, part.width, own);
    const int start = part.cache == nullptr ? 0 : *position;
    if (part.weight != nullptr) {
        float cosines[kOwn], sines[kOwn];
        load_angles(parts.cosines + t * parts.half, parts.half, cosines);
        load_angles(parts.sines + t * parts.half, parts.half, sines);
        norm_and_rotate(own, weight, part.plus, part.eps, part.width, cosines, sines, parts.half, room);
    }
    write_head(part, t, head, start, own);
}

__device__ __forceinline__ void do_block(const Blocks& blocks, int candidate, int rows, const int* position,
                                         float* room) {
    const int lane = threadIdx.x & 31, width = blocks.width, members = blocks.members;
    float own[kOwn] = {}, weight[kOwn], cosines[kOwn], sines[kOwn];
    load_own(blocks.weight, width, weight);
    device::wait_for_previous();
    load_angles(blocks.cosines + candidate * blocks.half, blocks.half, cosines);
    load_angles(blocks.sines + candidate * blocks.half, blocks.half, sines);
    const int start = blocks.before == nullptr ? 0 : *position;
    const int number = start / members + candidate, first = number * members;
    if (blocks.before != nullptr && first + members > start + rows) return;  // not complete yet
    for (int j = 0; j < members; j += kMembersAtOnce) {
        float raw[kMembersAtOnce][kOwn];
#pragma unroll
        for (int k = 0; k < kMembersAtOnce; ++k) {
            const int at = first + min(j + k, members - 1);
            load_own(at < start ? blocks.before + static_cast<long long>(at) * width
                                : blocks.rows + static_cast<long long>(at - start) * width, width, raw[k]);
        }
#pragma unroll
        for (int k = 0; k < kMembersAtOnce; ++k)
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (j + k < members) own[i] += raw[k][i];
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] /= static_cast<float>(members);
    norm_and_rotate(own, weight, 1.0f, blocks.eps, width, cosines, sines, blocks.half, room);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (i * 32 + lane < width) blocks.keys[static_cast<long long>(number) * width + i * 32 + lane] = own[i];
}

// Grid (blocks of 4 heads, T + candidates), 128 threads. Rows T + c: candidate c, by the first warp.
extern "C" __global__ void __launch_bounds__(128) take_rows(Inputs inputs, const Parts parts, const Blocks blocks) {
    __shared__ float room[kWarps * kWidest];
    device::let_next_start();
    const int warp = threadIdx.x >> 5, n = blockIdx.x * kWarps + warp, t = blockIdx.y;
    if (t < parts.rows && n < parts.heads)
        do_head(parts, t, n, inputs.position, room + warp * kWidest);
    else if (t >= parts.rows && n == 0)
        do_block(blocks, t - parts.rows, parts.rows, inputs.position, room);
    else
        device::wait_for_previous();
}
