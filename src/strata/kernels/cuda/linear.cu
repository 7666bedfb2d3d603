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

enum Source { kPlain, kSiluTimes, kSigmoidTimes };  // what the activations are: x, silu(gate) x, sigmoid(gate) x

struct Matrices {
    Matrix of[kMatrices];
    int count, groups, columns, chunk;  // chunk: a multiple of 512 columns
};

// Columns [first, first + chunk) of T rows into shared memory; zeros past the columns and for rows that are not there.
template <int T>
__device__ void stage(const float* x, const float* gate, int source, int rows, int columns, int first, int chunk,
                      float4* room) {
    const int fours = chunk / 4;
    const bool whole = columns % 4 == 0;
    for (int t = 0; t < T; ++t)
        for (int f = threadIdx.x; f < fours; f += blockDim.x) {
            const int column = first + f * 4;
            float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (t < rows && column < columns) {
                const long long at = static_cast<long long>(t) * columns + column;
                float g[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (whole) {
                    const float4 four = *reinterpret_cast<const float4*>(x + at);
                    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
                    if (source != kPlain) {
                        const float4 gates = *reinterpret_cast<const float4*>(gate + at);
                        g[0] = gates.x, g[1] = gates.y, g[2] = gates.z, g[3] = gates.w;
                    }
                } else {
                    for (int i = 0; i < 4 && column + i < columns; ++i) {
                        v[i] = x[at + i];
                        if (source != kPlain) g[i] = gate[at + i];
                    }
                }
                if (source != kPlain)
                    for (int i = 0; i < 4; ++i) v[i] = (source == kSiluTimes ? silu(g[i]) : sigmoid(g[i])) * v[i];
            }
            room[t * fours + place(f)] = make_float4(v[0], v[1], v[2], v[3]);
        }
}

// Grid: any number of blocks. Shared memory: T x chunk floats.
template <int T, int R, int kAhead>
__device__ void linears(const float* x, const float* gate, int source, int rows, const Matrices& all, float4* room) {
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
                stage<T>(x, gate, source, rows, all.columns, piece * all.chunk, all.chunk, room);
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
                if (lane == r * T + t && t < rows && row + r < m.rows && base + warp < all.groups)
                    m.y[static_cast<long long>(t) * m.rows + row + r] = total;
            }
    }
}

// R of each is ops.py's ROWS_OF_WARP.
#define STRATA_LINEARS(T, R, AHEAD)                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        linears_##T(const float* x, const float* gate, int source, int rows, const Matrices all) {               \
        extern __shared__ float4 room[];                                                                         \
        linears<T, R, AHEAD>(x, gate, source, rows, all, room);                                                  \
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
