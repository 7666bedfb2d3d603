// The stream mixers' arguments, and their two launches for any shape and format: `mix_down` normalises and projects the
// streams to the low rank, a stream's share of each sum apart; `mix_up` sums the shares, projects up and mixes.
#pragma once
#include "device.h"
#include "linear.h"
#include "rows.h"

namespace strata {
namespace rows {

// The add that comes before a mix, in the same launch: x + c (y + sigmoid(gate) more). `out` null: none is to be done.
struct Added {
    float* out;                          // T x S x H, what the mix then reads
    const float *c, *y, *gate, *more;    // T x S, T x H, T or null, T x H
};

struct Mixer {
    const float *x, *norm;  // T x S x H, S x H
    Added added;
    Matrix down, inject;    // F x SH, S x SH (rows 0: none)
    Matrix up;              // SH x F
    float *shares, *inverses;  // T x S x (F + S): each stream's part of down and inject; T x S
    float *u, *c;              // T x H; T x S or null
    int rows, streams, columns, rank;
    float eps;
    int down_forms, up_forms;  // of the staged rows of each product
    float share;               // 1 / columns
};

__device__ __forceinline__ float add_to(float x, float c, float y) { return fused(c, y, x); }

// Four columns of a stream of a row: x and what is added to it, read before any is used.
struct Four {
    float4 v, y, more;
};

constexpr int kNorms = 2;  // fours of a thread whose norm is read before the launch waits

__device__ __forceinline__ float4 four_at(const float* from, int column, int columns, bool by_fours) {
    if (by_fours) return *reinterpret_cast<const float4*>(from + column);
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < 4 && column + i < columns; ++i) values[i] = from[column + i];
    return make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ float4 norm_four(const Mixer& m, int s, int column) {
    if (column >= m.columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return four_at(m.norm + static_cast<long long>(s) * m.columns, column, m.columns, m.columns % 4 == 0);
}

__device__ __forceinline__ Four read_four(const Mixer& m, long long at, long long row, int column) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const bool is_inside = column < m.columns, by_fours = m.columns % 4 == 0;
    Four four = {zero, zero, zero};
    if (!is_inside) return four;
    four.v = four_at(m.x + at, column, m.columns, by_fours);
    if (m.added.out != nullptr) four.y = four_at(m.added.y + row, column, m.columns, by_fours);
    if (m.added.gate != nullptr) four.more = four_at(m.added.more + row, column, m.columns, by_fours);
    return four;
}

__device__ __forceinline__ float added_up(const Added& added, float v, float y, float more, float c, float gate) {
    if (added.out == nullptr) return v;
    return add_to(v, c, added.gate == nullptr ? y : y + gate * more);
}

// Columns of stream s of row t, times 1 + norm, into shared memory; this thread's sum of squares.
__device__ __forceinline__ float stage_row(const Mixer& m, int s, int t, const float4* norms, const Staged& x) {
    constexpr int kBatch = kNorms;
    const int from = min(t, m.rows - 1), fours = x.columns / 4, step = blockDim.x;
    const long long at = (static_cast<long long>(from) * m.streams + s) * m.columns;
    const long long row = static_cast<long long>(from) * m.columns;
    const float c = m.added.out == nullptr ? 0.0f : m.added.c[from * m.streams + s];
    const float gate = m.added.gate == nullptr ? 0.0f : sigmoid(m.added.gate[from]);
    float sum = 0.0f;
    for (int base = threadIdx.x; base < fours; base += kBatch * step) {
        Four four[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) four[k] = read_four(m, at, row, (base + k * step) * 4);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const Four& q = four[k];
            const float4 norm = base < step ? norms[k] : norm_four(m, s, (base + k * step) * 4);
            const int column = (base + k * step) * 4;
            if (column >= x.columns) break;  // the same for all lanes of a warp
            const float4 v = make_float4(added_up(m.added, q.v.x, q.y.x, q.more.x, c, gate),
                                         added_up(m.added, q.v.y, q.y.y, q.more.y, c, gate),
                                         added_up(m.added, q.v.z, q.y.z, q.more.z, c, gate),
                                         added_up(m.added, q.v.w, q.y.w, q.more.w, c, gate));
            if (m.added.out != nullptr && blockIdx.x == 0) {
                if (m.columns % 4 == 0 && column < m.columns)
                    *reinterpret_cast<float4*>(m.added.out + at + column) = v;
                else
                    for (int i = 0; i < 4 && column + i < m.columns; ++i)
                        m.added.out[at + column + i] = i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
            }
            sum = fused(v.w, v.w, fused(v.z, v.z, fused(v.y, v.y, fused(v.x, v.x, sum))));
            x.put(t, base + k * step, make_float4(v.x * (1.0f + norm.x), v.y * (1.0f + norm.y),
                                                  v.z * (1.0f + norm.z), v.w * (1.0f + norm.w)));
        }
    }
    return sum;
}

// Grid (blocks of a row of down or inject a warp, S). Shared memory: T staged rows of `padded` columns. The number of
// threads is a function of the shape alone: the sum of squares depends on it.
template <int T, int kAhead>
__device__ void mix_down(const Mixer& m, int padded, float4* memory) {
    __shared__ float room[2 * 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s = blockIdx.y;
    const int row = blockIdx.x * (blockDim.x >> 5) + warp, all = m.down.rows + m.inject.rows;
    const bool is_inject = row >= m.down.rows && m.inject.rows > 0;
    const Matrix w = is_inject ? m.inject : m.down;
    const int line[1] = {min(is_inject ? row - m.down.rows : row, w.rows - 1)};
    const int limit = m.columns * bytes_of(w.format), end = (limit + kStep - 1) / kStep * kStep;
    const Staged x(memory, T, padded, m.down_forms);
    float acc[1][T], inverses[T];
#pragma unroll
    for (int t = 0; t < T; ++t) acc[0][t] = 0.0f;
    Batch<1, kAhead> batch;
    batch.load(w, line, s * limit, limit, 0, end, lane);
    float4 norms[kNorms];  // of the first columns of this thread: weights, so they need not wait either
#pragma unroll
    for (int k = 0; k < kNorms; ++k) norms[k] = norm_four(m, s, (threadIdx.x + k * blockDim.x) * 4);
    device::wait_for_previous();
    for (int t = 0; t < T; ++t) {
        const float sum = block_sum(stage_row(m, s, t, norms, x), room + (t & 1) * 32);
        inverses[t] = inverse_root(sum * m.share + m.eps);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (int t = 0; t < m.rows; ++t) m.inverses[t * m.streams + s] = inverses[t];
    for (int start = 0; start < end; start += kAhead * kStep) {
        if (start > 0) batch.load(w, line, s * limit, limit, start, end, lane);
        multiply_batch<T, 1, kAhead>(w.format, batch, x, start, end, lane, acc);
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
        const float total = warp_sum(acc[0][t]) * inverses[t];
        if (lane == t && t < m.rows && row < all) m.shares[(t * m.streams + s) * all + row] = total;
    }
}

// The streams' shares of one sum, joined. `pitch`: sums of a stream.
__device__ __forceinline__ float sum_shares(const Mixer& m, int t, int i) {
    const int pitch = m.down.rows + m.inject.rows;
    const float* share = m.shares + t * m.streams * pitch + i;
    float total = share[0];
    if (m.streams == 4) {  // all under way at once
        const float second = share[pitch], third = share[2 * pitch], fourth = share[3 * pitch];
        return (total + second + third + fourth) * 0.25f;
    }
    for (int s = 1; s < m.streams; ++s) total += share[s * pitch];
    return total / static_cast<float>(m.streams);
}

// The low rank's values of T rows into shared memory, and the injection by the last warp of block 0.
template <int T>
__device__ __forceinline__ void stage_shares(const Mixer& m, const Staged& d, int width) {
    for (int f = threadIdx.x; f < T * width; f += blockDim.x) {  // width: whole warps
        const int t = T == 1 ? 0 : f / width, i = f - t * width;
        d.put_one(t, i, t < m.rows && i < m.rank ? silu(sum_shares(m, t, i)) : 0.0f);
    }
    if (m.c != nullptr && blockIdx.x == 0 && threadIdx.x >= blockDim.x - 32)
        for (int i = threadIdx.x & 31; i < m.rows * m.streams; i += 32)
            m.c[i] = 2.0f * sigmoid(sum_shares(m, i / m.streams, m.rank + i % m.streams));
}

// Grid: any number of blocks. A warp takes a column h and 4 streams at once. Shared memory: T staged rows of the rank.
template <int T, int kAhead>
__device__ void mix_up(const Mixer& m, int padded, float4* memory) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int limit = m.rank * bytes_of(m.up.format), end = (limit + kStep - 1) / kStep * kStep;
    const int t = min(lane, m.rows - 1);  // of lanes that have one
    const float* streams = m.added.out == nullptr ? m.x : m.added.out;
    const Staged d(memory, T, padded, m.up_forms);
    bool is_staged = false;
    for (int base = blockIdx.x * warps; base < m.columns; base += gridDim.x * warps) {
        const int h = min(base + warp, m.columns - 1);
        float u = 0.0f;
        for (int first = 0; first < m.streams; first += 4) {
            int lines[4];
            float acc[4][T], mine[4], x[4], inverse[4], norm[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                lines[r] = min(first + r, m.streams - 1) * m.columns + h;
#pragma unroll
                for (int k = 0; k < T; ++k) acc[r][k] = 0.0f;
            }
            Batch<4, kAhead> batch;
            batch.load(m.up, lines, 0, limit, 0, end, lane);
#pragma unroll
            for (int r = 0; r < 4; ++r) norm[r] = m.norm[min(first + r, m.streams - 1) * m.columns + h];
            if (!is_staged) device::wait_for_previous();
#pragma unroll
            for (int r = 0; r < 4; ++r) {  // read before the products, not after them
                const int s = min(first + r, m.streams - 1);
                x[r] = streams[(static_cast<long long>(t) * m.streams + s) * m.columns + h];
                inverse[r] = m.inverses[t * m.streams + s];
            }
            if (!is_staged) {
                stage_shares<T>(m, d, d.columns);
                __syncthreads();
                is_staged = true;
            }
            for (int start = 0; start < end; start += kAhead * kStep) {
                if (start > 0) batch.load(m.up, lines, 0, limit, start, end, lane);
                multiply_batch<T, 4, kAhead>(m.up.format, batch, d, start, end, lane, acc);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int k = 0; k < T; ++k) {
                    const float total = warp_sum(acc[r][k]);
                    if (lane == k) mine[r] = total;
                }
#pragma unroll
            for (int r = 0; r < 4; ++r)
                if (first + r < m.streams) u = fused(sigmoid(mine[r]), x[r] * inverse[r] * (1.0f + norm[r]), u);
        }
        if (lane < m.rows && base + warp < m.columns)
            m.u[static_cast<long long>(lane) * m.columns + h] = u / static_cast<float>(m.streams);
    }
}

}  // namespace rows
}  // namespace strata
