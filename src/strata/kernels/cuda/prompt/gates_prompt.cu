// What lies around the products of a prompt's layers, each in one reading: the delta net's convolution with its unit
// lengths and gates, gated norms, head norms with rotary values, gated products, the router. What only products read is
// BF16. A row is computed by itself, in one order.
#include "pairs.h"
#include "rows.h"

namespace strata {
namespace prompt {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMost = 4;   // values of a lane: heads have at most 128
constexpr int kSteps = 32; // rows of a block of the convolution
constexpr int kTaps = 8;

__device__ __forceinline__ unsigned short bf16(float x) { return static_cast<unsigned short>(pairs::rounded(x, 0.0f)); }

struct Inputs {
    const float *x, *tail, *weight, *b, *a, *log_decay, *bias;  // T x C, U x C, C x taps, T x N twice, N twice
    unsigned short *q, *k, *v;                                  // T x G x D twice, T x N x V
    float *beta, *decay;                                        // T x N
    int first, stop, taps, key_heads, value_heads, key_width, value_width;
    float scale;
};

// Grid (heads of queries, keys and values, and one more for the gates; parts of 32 rows from `first` on).
__device__ __forceinline__ void inputs(const Inputs& a) {
    __shared__ float weights[kTaps][kMost * 32];
    const int head = blockIdx.x, base = a.first + blockIdx.y * kSteps, end = min(a.stop, base + kSteps);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (head == 2 * a.key_heads + a.value_heads) {
        for (int i = threadIdx.x; i < (end - base) * a.value_heads; i += kThreads) {
            const long long at = static_cast<long long>(base) * a.value_heads + i;
            const int n = i % a.value_heads;
            const float step = a.a[at] + a.bias[n];
            a.beta[at] = rows::sigmoid(a.b[at]);
            a.decay[at] = -(expf(a.log_decay[n]) * (step > 20.0f ? step : log1pf(expf(step))));
        }
        return;
    }
    const bool valued = head >= 2 * a.key_heads;
    const int channels = 2 * a.key_heads * a.key_width + a.value_heads * a.value_width;
    const int width = valued ? a.value_width : a.key_width, number = head - 2 * a.key_heads;
    const int start = valued ? 2 * a.key_heads * a.key_width + number * a.value_width : head * a.key_width;
    for (int i = threadIdx.x; i < width * a.taps; i += kThreads)
        weights[i % a.taps][i / a.taps] = a.weight[static_cast<long long>(start) * a.taps + i];
    __syncthreads();
    for (int row = base + warp; row < end; row += kWarps) {
        float own[kMost], squares = 0.0f;
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
            const int i = lane + 32 * j;
            float total = 0.0f;
            if (i < width)
                for (int tap = 0; tap < a.taps; ++tap) {
                    const int at = row - (a.taps - 1) + tap;  // of x; those before the first new row are the tail's
                    const float* from = at >= a.first ? a.x + static_cast<long long>(at) * channels
                                                      : a.tail + static_cast<long long>(at - a.first + a.taps - 1) * channels;
                    total = rows::fused(weights[tap][i], from[start + i], total);
                }
            own[j] = i < width ? rows::silu(total) : 0.0f;
            squares = rows::fused(own[j], own[j], squares);
        }
        float scale = 1.0f;
        if (!valued) {
            scale = rows::inverse_root(rows::warp_sum(squares) + 1e-6f);
            if (head < a.key_heads) scale *= a.scale;
        }
        unsigned short* to = valued ? a.v + (static_cast<long long>(row) * a.value_heads + number) * width
                                    : (head < a.key_heads ? a.q : a.k) +
                                          (static_cast<long long>(row) * a.key_heads + head % a.key_heads) * width;
#pragma unroll
        for (int j = 0; j < kMost; ++j)
            if (lane + 32 * j < width) to[lane + 32 * j] = bf16(own[j] * scale);
    }
}

// normed[i] = weight * o * rsqrt(mean of squares + eps) * gate(z) in BF16, a warp for each of `count` heads of rows.
__device__ __forceinline__ void gated_norm(const float* o, const float* z, const float* weight, float eps, int count,
                                           int width, int silu, unsigned short* normed) {
    const int lane = threadIdx.x & 31, number = blockIdx.x * kWarps + (threadIdx.x >> 5);
    if (number >= count) return;
    const long long at = static_cast<long long>(number) * width;
    float own[kMost], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
        const int i = lane + 32 * j;
        own[j] = i < width ? o[at + i] : 0.0f;
        squares = rows::fused(own[j], own[j], squares);
    }
    const float scale = rows::inverse_root(rows::warp_sum(squares) / static_cast<float>(width) + eps);
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
        const int i = lane + 32 * j;
        if (i >= width) continue;
        const float gate = z[at + i];
        normed[at + i] = bf16(own[j] * scale * weight[i] * (silu ? rows::silu(gate) : rows::sigmoid(gate)));
    }
}

// rope(rms_norm(x)) of T x N heads that lie `apart` values from each other, rows `pitch` values.
struct Heads {
    const float *x, *weight, *cosines, *sines;  // cosines and sines: T x R
    float* out;                                 // T x N x D
    int rows, heads, width, half, apart, pitch, plus_one;
    float eps;
};

__device__ __forceinline__ void norm_rope(const Heads& a) {
    constexpr int kValues = 8;  // of a lane: heads of at most 256
    __shared__ float room[kWarps][kValues * 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const long long number = static_cast<long long>(blockIdx.x) * kWarps + warp;
    if (number >= static_cast<long long>(a.rows) * a.heads) return;
    const long long row = number / a.heads;
    const float* x = a.x + row * a.pitch + number % a.heads * a.apart;
    float own[kValues], squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
        const int i = lane + 32 * j;
        own[j] = i < a.width ? x[i] : 0.0f;
        squares = rows::fused(own[j], own[j], squares);
    }
    const float scale = rows::inverse_root(rows::warp_sum(squares) / static_cast<float>(a.width) + a.eps);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
        const int i = lane + 32 * j;
        if (i < a.width) room[warp][i] = own[j] * scale * (a.plus_one ? 1.0f + a.weight[i] : a.weight[i]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
        const int i = lane + 32 * j;
        if (i >= a.width) continue;
        float value = room[warp][i];
        if (i < 2 * a.half) {
            const int pair = i < a.half ? i : i - a.half;
            const float cosine = a.cosines[row * a.half + pair], sine = a.sines[row * a.half + pair];
            value = i < a.half ? value * cosine - room[warp][i + a.half] * sine
                               : value * cosine + room[warp][i - a.half] * sine;
        }
        a.out[number * a.width + i] = value;
    }
}

// The router of a row by a warp: softmax over E logits, the top k by (logit descending, id ascending), NaN last. Rows
// outside [first, stop) pick expert -1.
__device__ __forceinline__ void route(const float* logits, int rows_of_frame, int first, int stop, int experts, int top_k,
                                      int renormalise, int* ids, float* weights) {
    constexpr int kValues = 32;  // of a lane: at most 1,024 experts
    const int lane = threadIdx.x & 31, row = blockIdx.x * kWarps + (threadIdx.x >> 5);
    if (row >= rows_of_frame) return;
    int* to = ids + static_cast<long long>(row) * top_k;
    float* scaled = weights + static_cast<long long>(row) * top_k;
    if (row < first || row >= stop) {
        for (int i = lane; i < top_k; i += 32) to[i] = -1, scaled[i] = 0.0f;
        return;
    }
    const float* own = logits + static_cast<long long>(row) * experts;
    float values[kValues];
    unsigned taken = 0;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
        const int i = lane + 32 * j;
        values[j] = i < experts ? own[i] : rows::lowest();
        if (i >= experts) taken |= 1u << j;
    }
    float largest = 0.0f, sum = 0.0f, total = 0.0f;
    for (int pick = 0; pick < top_k; ++pick) {
        unsigned best = 0, number = 0xFFFFFFFFu;
#pragma unroll
        for (int j = 0; j < kValues; ++j) {
            const unsigned key = rows::ordered(values[j]);
            if (!(taken >> j & 1u) && (number == 0xFFFFFFFFu || key > best)) best = key, number = lane + 32 * j;
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            const unsigned key = __shfl_xor_sync(rows::kAll, best, step), id = __shfl_xor_sync(rows::kAll, number, step);
            if (id != 0xFFFFFFFFu && (number == 0xFFFFFFFFu || key > best || (key == best && id < number)))
                best = key, number = id;
        }
        const float logit = rows::unordered(best);
        if (pick == 0) {
            largest = logit;
#pragma unroll
            for (int j = 0; j < kValues; ++j)
                if (lane + 32 * j < experts) sum += expf(values[j] - largest);
            sum = rows::warp_sum(sum);
        }
        if ((number & 31u) == static_cast<unsigned>(lane)) taken |= 1u << (number >> 5);
        const float weight = expf(logit - largest) / sum;
        total += weight;
        if (lane == 0) to[pick] = static_cast<int>(number), scaled[pick] = weight;
    }
    __syncwarp();
    if (renormalise)
        for (int i = lane; i < top_k; i += 32) scaled[i] = scaled[i] / total;
}

}  // namespace prompt
}  // namespace strata

extern "C" __global__ void __launch_bounds__(256)
    route(const float* logits, int rows, int first, int stop, int experts, int top_k, int renormalise, int* ids,
          float* weights) {
    strata::prompt::route(logits, rows, first, stop, experts, top_k, renormalise, ids, weights);
}
extern "C" __global__ void __launch_bounds__(256) delta_inputs(strata::prompt::Inputs a) { strata::prompt::inputs(a); }
extern "C" __global__ void __launch_bounds__(256)
    gated_norm(const float* o, const float* z, const float* weight, float eps, int count, int width, int silu,
               unsigned short* normed) {
    strata::prompt::gated_norm(o, z, weight, eps, count, width, silu, normed);
}
extern "C" __global__ void __launch_bounds__(256) norm_rope(strata::prompt::Heads a) { strata::prompt::norm_rope(a); }

// gate(g) * x in BF16, over heads of `width` values; those of g lie `apart` values from each other, rows `pitch`.
extern "C" __global__ void __launch_bounds__(256)
    gated(const float* gate, const float* x, int heads, int width, int apart, int pitch, int silu, unsigned short* out) {
    using namespace strata;
    const int i = blockIdx.y * 256 + threadIdx.x;
    if (i >= heads * width) return;
    const long long row = blockIdx.x;
    const float g = gate[row * pitch + static_cast<long long>(i / width) * apart + i % width];
    const long long at = row * heads * width + i;
    out[at] = prompt::bf16((silu ? rows::silu(g) : rows::sigmoid(g)) * x[at]);
}

// y + sigmoid(gate of the row) * x.
extern "C" __global__ void __launch_bounds__(256)
    add_gated(const float* y, const float* gate, const float* x, int width, float* out) {
    using namespace strata;
    const int i = blockIdx.y * 256 + threadIdx.x;
    if (i >= width) return;
    const long long at = static_cast<long long>(blockIdx.x) * width + i;
    out[at] = rows::fused(rows::sigmoid(gate[blockIdx.x]), x[at], y[at]);
}

// 8-bit codes times the scale of their block of 32, rounded to BF16 once; rows of `columns` of `padded` codes.
extern "C" __global__ void __launch_bounds__(256)
    dequantise(const signed char* codes, const unsigned short* scales, int columns, int padded, unsigned short* out) {
    using namespace strata;
    const long long row = blockIdx.x;
    const int i = (blockIdx.y * 256 + threadIdx.x) * 4;
    if (i >= columns) return;
    const unsigned four = *reinterpret_cast<const unsigned*>(codes + row * padded + i);
    const float scale = device::half_value(scales[row * (padded / 32) + i / 32]);
    unsigned pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
        pair[j] = pairs::rounded(static_cast<float>(static_cast<signed char>(four >> 16 * j)) * scale,
                                 static_cast<float>(static_cast<signed char>(four >> (16 * j + 8))) * scale);
    unsigned short* to = out + row * columns + i;
    if (columns % 4 == 0)
        *reinterpret_cast<uint2*>(to) = make_uint2(pair[0], pair[1]);
    else
        for (int j = 0; j < 4 && i + j < columns; ++j) to[j] = static_cast<unsigned short>(pair[j >> 1] >> 16 * (j & 1));
}
