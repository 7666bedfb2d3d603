// Products of 1 to 8 rows with dense weights (q8_0, BF16, FP32): several matrices over the same rows in one launch, and
// the embedding. Bound by reading the weights once: bytes = O x I x (1.0625, 2 or 4).
//
// A warp computes R rows of a matrix for all rows of activations; kAhead steps of R rows are under way at once.
// Activations lie in shared memory, in pieces of `chunk` columns if they do not fit whole; pieces are whole steps of
// every format, so they change no order.
#include "device.h"
#include "linear.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

constexpr int kMatrices = 8;  // linear_ops.py: MOST_MATRICES

// What the activations are: x, silu(gate) x, sigmoid(gate) x, or the gated norm of heads: weight rms(x) gate(z).
enum Source { kPlain, kSiluTimes, kSigmoidTimes, kNormSigmoid, kNormSilu };

// Column c of a row of the gate lies at c / gate_width * gate_pitch + c % gate_width.
struct Activations {
    const float *x, *gate, *weight;  // weight: of a norm's heads
    int source, rows, gate_width, gate_pitch, gate_row, width;  // width: of a norm's heads
    float eps;
    int by_fours;  // rows and gates may be read 16 bytes at once
};

struct Matrices {
    Matrix of[kMatrices];
    int count, groups, columns, chunk;  // chunk: a multiple of 512 columns
};

__device__ __forceinline__ float gated(const Activations& a, float x, float gate) {
    return (a.source == kSiluTimes ? silu(gate) : sigmoid(gate)) * x;
}

// What `stage_norm` does, for heads of 128 columns: the reads of three heads are under way at once.
__device__ void stage_norm_128(const Activations& a, int t, int columns, int first, int chunk, float* room) {
    constexpr int kHeads = 3, kWidth = 128, kOwn = kWidth / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int last = min(first + chunk, columns);
    const float* x = a.x + static_cast<long long>(t) * columns + lane;
    const float* z = a.gate + static_cast<long long>(t) * columns + lane;
    float weight[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) weight[i] = a.weight[lane + i * 32];
    for (int head = first / kWidth + warp; head * kWidth < last; head += kHeads * warps) {
        float values[kHeads][kOwn], gates[kHeads][kOwn];
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            const int at = min(head + k * warps, columns / kWidth - 1) * kWidth;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) values[k][i] = x[at + i * 32], gates[k][i] = z[at + i * 32];
        }
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            const int own = head + k * warps;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) sum = fused(values[k][i], values[k][i], sum);
            const float inverse = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(kWidth) + a.eps);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const int column = own * kWidth + lane + i * 32 - first;
                const float gate = a.source == kNormSilu ? silu(gates[k][i]) : sigmoid(gates[k][i]);
                if (own * kWidth < last)
                    room[place(column >> 2) * 4 + (column & 3)] = values[k][i] * inverse * weight[i] * gate;
            }
        }
    }
    for (int column = last - first + threadIdx.x; column < chunk; column += blockDim.x)
        room[place(column >> 2) * 4 + (column & 3)] = 0.0f;
}

// The gated norm (delta.cu's operations) of the heads that have columns in [first, first + chunk), a warp a head.
__device__ void stage_norm(const Activations& a, int t, int columns, int first, int chunk, float* room) {
    const int lane = threadIdx.x & 31, last = min(first + chunk, columns);
    for (int head = first / a.width + (threadIdx.x >> 5); head * a.width < last; head += blockDim.x >> 5) {
        const float* x = a.x + static_cast<long long>(t) * columns + head * a.width;
        const float* z = a.gate + static_cast<long long>(t) * columns + head * a.width;
        float sum = 0.0f;
        for (int i = lane; i < a.width; i += 32) sum = fused(x[i], x[i], sum);
        const float inverse = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(a.width) + a.eps);
        for (int i = lane; i < a.width; i += 32) {
            const int column = head * a.width + i - first;
            if (column >= 0 && column < chunk)
                room[place(column >> 2) * 4 + (column & 3)] =
                    x[i] * inverse * a.weight[i] * (a.source == kNormSilu ? silu(z[i]) : sigmoid(z[i]));
        }
    }
    for (int column = last - first + threadIdx.x; column < chunk; column += blockDim.x)
        room[place(column >> 2) * 4 + (column & 3)] = 0.0f;
}

// Columns [first, first + chunk) of T rows into shared memory; zeros past the columns and for rows that are not there.
template <int T>
__device__ void stage(const Activations& a, int columns, int first, int chunk, float4* room) {
    const int fours = chunk / 4;
    for (int t = 0; t < T; ++t) {
        if (t < a.rows && a.source >= kNormSigmoid) {
            if (a.width == 128)
                stage_norm_128(a, t, columns, first, chunk, reinterpret_cast<float*>(room + t * fours));
            else
                stage_norm(a, t, columns, first, chunk, reinterpret_cast<float*>(room + t * fours));
            continue;
        }
        const float* x = a.x + static_cast<long long>(t) * columns;
        const float* gate = a.gate + static_cast<long long>(t) * a.gate_row;
        for (int f = threadIdx.x; f < fours; f += blockDim.x) {
            const int column = first + f * 4;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (t < a.rows && column < columns && a.by_fours) {
                v = *reinterpret_cast<const float4*>(x + column);
                if (a.source != kPlain) {
                    const int at = column / a.gate_width * a.gate_pitch + column % a.gate_width;
                    const float4 g = *reinterpret_cast<const float4*>(gate + at);
                    v = make_float4(gated(a, v.x, g.x), gated(a, v.y, g.y), gated(a, v.z, g.z), gated(a, v.w, g.w));
                }
            } else if (t < a.rows && column < columns) {
                float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                for (int i = 0; i < 4 && column + i < columns; ++i) {
                    const int at = (column + i) / a.gate_width * a.gate_pitch + (column + i) % a.gate_width;
                    values[i] = a.source == kPlain ? x[column + i] : gated(a, x[column + i], gate[at]);
                }
                v = make_float4(values[0], values[1], values[2], values[3]);
            }
            room[t * fours + place(f)] = v;
        }
    }
}

// Grid: any number of blocks. Shared memory: T x chunk floats.
template <int T, int R, int kAhead>
__device__ void linears(const Activations& a, const Matrices& all, float4* room) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int pieces = (all.columns + all.chunk - 1) / all.chunk;
    device::let_next_start();
    bool is_staged = false;
    for (int base = blockIdx.x * warps; base < all.groups; base += gridDim.x * warps) {
        const int group = min(base + warp, all.groups - 1);
        int which = 0;
        while (which + 1 < all.count && group >= all.of[which + 1].first) ++which;
        const Matrix m = all.of[which];
        const int row = (group - m.first) * R, size = bytes_of(m.format);
        int lines[R];
#pragma unroll
        for (int r = 0; r < R; ++r) lines[r] = min(row + r, m.rows - 1);
        float acc[R][T];
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int t = 0; t < T; ++t) acc[r][t] = 0.0f;
        for (int piece = 0; piece < pieces; ++piece) {
            const int first = piece * all.chunk * size;
            const int end = min(first + all.chunk * size, (m.row_bytes + kStep - 1) / kStep * kStep);
            Batch<R, kAhead> batch;
            batch.load(m, lines, 0, m.row_bytes, first, end, lane);  // does not wait for the activations
            if (!is_staged || pieces > 1) {
                if (!is_staged) device::wait_for_previous();
                __syncthreads();
                stage<T>(a, all.columns, piece * all.chunk, all.chunk, room);
                __syncthreads();
                is_staged = true;
            }
            for (int start = first; start < end; start += kAhead * kStep) {
                if (start != first) batch.load(m, lines, 0, m.row_bytes, start, end, lane);
#pragma unroll
                for (int u = 0; u < kAhead; ++u) {
                    if (start + u * kStep >= end) break;
                    multiply_any<T, R>(m.format, batch.raw[u], batch.scale[u], room,
                                       start - first + u * kStep + lane * 16, all.chunk / 4, acc);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const float total = warp_sum(acc[r][t]);
                if (lane == r * T + t && t < a.rows && row + r < m.rows && base + warp < all.groups)
                    m.y[static_cast<long long>(t) * m.rows + row + r] = total;
            }
    }
}

// R of each is ops.py's ROWS_OF_WARP.
#define STRATA_LINEARS(T, R, AHEAD)                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        linears_##T(const Activations a, const Matrices all) {                                                   \
        extern __shared__ float4 room[];                                                                         \
        linears<T, R, AHEAD>(a, all, room);                                                                      \
    }

STRATA_LINEARS(1, 2, 4)
STRATA_LINEARS(2, 2, 4)
STRATA_LINEARS(4, 4, 2)
STRATA_LINEARS(8, 4, 2)

// y[t] = row ids[t] of the table as FP32, one block a row of the window. Ids outside are those of the nearest row.
extern "C" __global__ void embedding(Inputs inputs, const unsigned char* data, const unsigned short* scales, int format,
                                     int vocabulary, int columns, int row_bytes, float* y) {
    device::wait_for_previous();
    const int t = blockIdx.x;
    const long long id = max(0, min(inputs.ids[t], vocabulary - 1));
    const unsigned char* row = data + id * row_bytes;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value;
        if (format == kQ8)
            value = static_cast<float>(reinterpret_cast<const signed char*>(row)[i]) *
                    device::half_value(scales[id * (row_bytes / 32) + i / 32]);
        else if (format == kBf16)
            value = device::bf16_low(reinterpret_cast<const unsigned short*>(row)[i]);
        else
            value = reinterpret_cast<const float*>(row)[i];
        y[static_cast<long long>(t) * columns + i] = value;
    }
}
