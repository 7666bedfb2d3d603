// Hyper-connections of a prompt's pass, each in one reading of the streams: the block's output added and the norm of the
// next mixer, and the mixed input of a block. A row is computed by itself, in one order.
#include "pairs.h"
#include "rows.h"

namespace strata {
namespace prompt {

constexpr int kThreads = 256;
constexpr int kOwn = 4;  // columns of a thread at once

// normed[row, s] = x[row, s] * rsqrt(mean of squares + eps) * (1 + norm[s]) in BF16. Grid (rows, streams).
__device__ __forceinline__ void norm(const float* x, const float* weight, float eps, int streams, int hidden,
                                     unsigned short* normed) {
    __shared__ float room[kThreads / 32];
    const long long at = (static_cast<long long>(blockIdx.x) * streams + blockIdx.y) * hidden;
    const float* own = x + at;
    float squares = 0.0f;
    for (int i = threadIdx.x * kOwn; i < hidden; i += kThreads * kOwn)
#pragma unroll
        for (int j = 0; j < kOwn; ++j)
            if (i + j < hidden) squares = rows::fused(own[i + j], own[i + j], squares);
    const float scale = rows::inverse_root(rows::block_sum(squares, room) / static_cast<float>(hidden) + eps);
    for (int i = threadIdx.x * kOwn; i < hidden; i += kThreads * kOwn)
#pragma unroll
        for (int j = 0; j < kOwn; ++j)
            if (i + j < hidden)
                normed[at + i + j] = static_cast<unsigned short>(
                    tensor::bf16_bits(own[i + j] * scale * (1.0f + weight[blockIdx.y * hidden + i + j])));
}

// u[row] = mean over streams, in order, of sigmoid(gate[row, s]) * normed[row, s]; and rounded to BF16.
__device__ __forceinline__ void mix(const float* gate, const unsigned short* normed, int streams, int hidden, float* u,
                                    unsigned short* rounded) {
    const long long row = blockIdx.x;
    const int i = blockIdx.y * kThreads + threadIdx.x;
    if (i >= hidden) return;
    float total = 0.0f;
    for (int s = 0; s < streams; ++s) {
        const long long at = (row * streams + s) * hidden + i;
        total = rows::fused(rows::sigmoid(gate[at]), device::bf16_low(normed[at]), total);
    }
    const float mean = total / static_cast<float>(streams);
    u[row * hidden + i] = mean;
    rounded[row * hidden + i] = static_cast<unsigned short>(pairs::rounded(mean, 0.0f));
}

// sum[row, s] = x[row, s] + c[row, s] * y[row].
__device__ __forceinline__ void add(const float* x, const float* c, const float* y, int streams, int hidden, float* sum) {
    const long long row = blockIdx.x;
    const int i = blockIdx.y * kThreads + threadIdx.x;
    if (i >= hidden) return;
    const float own = y[row * hidden + i];
    for (int s = 0; s < streams; ++s) {
        const long long at = (row * streams + s) * hidden + i;
        sum[at] = rows::fused(c[row * streams + s], own, x[at]);
    }
}

// `add` and then `norm` of what it gives, in one reading, for a hidden width that is a multiple of 4 and at most kHeld *
// 1,024: the same bits. Grid (rows, streams).
constexpr int kHeld = 4;
__device__ __forceinline__ void add_norm(const float* x, const float* c, const float* y, const float* weight, float eps,
                                         int streams, int hidden, float* sum, unsigned short* normed) {
    __shared__ float room[kThreads / 32];
    const long long row = blockIdx.x, at = (row * streams + blockIdx.y) * hidden;
    const float strength = c[row * streams + blockIdx.y];
    float4 own[kHeld];
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
        const int i = (threadIdx.x + j * kThreads) * kOwn;
        if (i >= hidden) continue;
        const float4 before = *reinterpret_cast<const float4*>(x + at + i);
        const float4 more = *reinterpret_cast<const float4*>(y + row * hidden + i);
        own[j].x = rows::fused(strength, more.x, before.x), own[j].y = rows::fused(strength, more.y, before.y);
        own[j].z = rows::fused(strength, more.z, before.z), own[j].w = rows::fused(strength, more.w, before.w);
        *reinterpret_cast<float4*>(sum + at + i) = own[j];
        squares = rows::fused(own[j].x, own[j].x, squares), squares = rows::fused(own[j].y, own[j].y, squares);
        squares = rows::fused(own[j].z, own[j].z, squares), squares = rows::fused(own[j].w, own[j].w, squares);
    }
    const float scale = rows::inverse_root(rows::block_sum(squares, room) / static_cast<float>(hidden) + eps);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
        const int i = (threadIdx.x + j * kThreads) * kOwn;
        if (i >= hidden) continue;
        const float4 w = *reinterpret_cast<const float4*>(weight + blockIdx.y * hidden + i);
        *reinterpret_cast<uint2*>(normed + at + i) =
            make_uint2(pairs::rounded(own[j].x * scale * (1.0f + w.x), own[j].y * scale * (1.0f + w.y)),
                       pairs::rounded(own[j].z * scale * (1.0f + w.z), own[j].w * scale * (1.0f + w.w)));
    }
}

}  // namespace prompt
}  // namespace strata

extern "C" __global__ void __launch_bounds__(256)
    streams_add_norm(const float* x, const float* c, const float* y, const float* weight, float eps, int streams, int hidden,
                     float* sum, unsigned short* normed) {
    strata::prompt::add_norm(x, c, y, weight, eps, streams, hidden, sum, normed);
}

// Of rows of `pitch` products of the normed streams: low = silu(its first `rank` / S) in BF16, and, for `inject` not 0,
// c = 2 sigmoid(the S behind them / S).
extern "C" __global__ void __launch_bounds__(256)
    streams_gates(const float* products, int pitch, int rank, int streams, int inject, unsigned short* low, float* c) {
    using namespace strata;
    const int i = blockIdx.y * 256 + threadIdx.x;
    const long long row = blockIdx.x;
    if (i >= rank + (inject ? streams : 0)) return;
    const float x = products[row * pitch + i] / static_cast<float>(streams);
    if (i < rank)
        low[row * rank + i] = static_cast<unsigned short>(pairs::rounded(rows::silu(x), 0.0f));
    else
        c[row * streams + i - rank] = 2.0f * rows::sigmoid(x);
}

extern "C" __global__ void __launch_bounds__(256) streams_norm(const float* x, const float* weight, float eps, int streams,
                                                               int hidden, unsigned short* normed) {
    strata::prompt::norm(x, weight, eps, streams, hidden, normed);
}
extern "C" __global__ void __launch_bounds__(256)
    streams_mix(const float* gate, const unsigned short* normed, int streams, int hidden, float* u,
                unsigned short* rounded) {
    strata::prompt::mix(gate, normed, streams, hidden, u, rounded);
}
extern "C" __global__ void __launch_bounds__(256)
    streams_add(const float* x, const float* c, const float* y, int streams, int hidden, float* sum) {
    strata::prompt::add(x, c, y, streams, hidden, sum);
}

// Gated delta net: the causal convolution with SiLU over rows that follow a tail, in place of z's last rows. Grid (rows,
// blocks of channels). y[t] = silu(sum over taps, in order, of weight[w] * z[t + w * dilation]), z = tail before x[first].
extern "C" __global__ void __launch_bounds__(256)
    convolve(const float* x, const float* tail, const float* weight, int taps, int dilation, int channels, int first,
             float* y) {
    const int row = first + blockIdx.x, i = blockIdx.y * 256 + threadIdx.x, before = (taps - 1) * dilation;
    if (i >= channels) return;
    float total = 0.0f;
    for (int tap = 0; tap < taps; ++tap) {
        const int at = row - before + tap * dilation;  // of x; those before the first new row are the tail's
        const float value = at >= first ? x[static_cast<long long>(at) * channels + i]
                                        : tail[static_cast<long long>(at - first + before) * channels + i];
        total = strata::rows::fused(weight[i * taps + tap], value, total);
    }
    y[static_cast<long long>(row) * channels + i] = strata::rows::silu(total);
}
