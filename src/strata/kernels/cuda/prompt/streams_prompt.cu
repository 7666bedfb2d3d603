// Hyper-connections of a prompt's pass, each in one reading of the streams: the block's output added and the norm of the
// next mixer, and the mixed input of a block. A row is computed by itself, in one order.
#include "rows.h"
#include "tensor.h"

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

// u[row] = mean over streams, in order, of sigmoid(gate[row, s]) * normed[row, s].
__device__ __forceinline__ void mix(const float* gate, const unsigned short* normed, int streams, int hidden, float* u) {
    const long long row = blockIdx.x;
    const int i = blockIdx.y * kThreads + threadIdx.x;
    if (i >= hidden) return;
    float total = 0.0f;
    for (int s = 0; s < streams; ++s) {
        const long long at = (row * streams + s) * hidden + i;
        total = rows::fused(rows::sigmoid(gate[at]), device::bf16_low(normed[at]), total);
    }
    u[row * hidden + i] = total / static_cast<float>(streams);
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

}  // namespace prompt
}  // namespace strata

extern "C" __global__ void __launch_bounds__(256) streams_norm(const float* x, const float* weight, float eps, int streams,
                                                               int hidden, unsigned short* normed) {
    strata::prompt::norm(x, weight, eps, streams, hidden, normed);
}
extern "C" __global__ void __launch_bounds__(256)
    streams_mix(const float* gate, const unsigned short* normed, int streams, int hidden, float* u) {
    strata::prompt::mix(gate, normed, streams, hidden, u);
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
