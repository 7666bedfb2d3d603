// Hyper-connections and the n-gram gate. `hyper_mix` is two launches: `mix_down` normalises and projects the streams to
// the low rank, a stream's share of each sum apart; `mix_up` sums the shares, projects up and mixes. Bytes of both are
// those of the weights: F x SH and SH x F (3.3 M weights each for 320 x 10,240: 0.8 us at 8 bits, 1.6 in BF16).
#include "device.h"
#include "linear.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

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
    int unused;
};

__device__ __forceinline__ float add_to(float x, float c, float y) { return fused(c, y, x); }

// One row's columns of a stream, one at a time; this thread's sum of squares. `at`: where they lie in x and out.
__device__ float stage_ones(const Mixer& m, int s, long long at, int from, float c, float gate, int padded, float* x) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {
        float value = i < m.columns ? m.x[at + i] : 0.0f;
        if (m.added.out != nullptr && i < m.columns) {
            float y = m.added.y[from * m.columns + i];
            if (m.added.gate != nullptr) y = y + gate * m.added.more[from * m.columns + i];
            value = add_to(value, c, y);
            if (blockIdx.x == 0) m.added.out[at + i] = value;
        }
        sum = fused(value, value, sum);
        x[place(i >> 2) * 4 + (i & 3)] = i < m.columns ? value * (1.0f + m.norm[s * m.columns + i]) : 0.0f;
    }
    return sum;
}

// The same four columns at a time, with all of a batch's reads under way before the first write: a write to `out` could
// be to what is read next, for all that the compiler knows, and each read would be waited for by itself.
__device__ float stage_fours(const Mixer& m, int s, long long at, int from, float c, float gate, int fours, float* x) {
    constexpr int kBatch = 5;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto* values = reinterpret_cast<const float4*>(m.x + at);
    const auto* norms = reinterpret_cast<const float4*>(m.norm + static_cast<long long>(s) * m.columns);
    const long long row = static_cast<long long>(from) * m.columns;
    auto* room = reinterpret_cast<float4*>(x);
    const int limit = m.columns / 4;
    float sum = 0.0f;
    for (int base = threadIdx.x; base < fours; base += kBatch * blockDim.x) {
        float4 v[kBatch], n[kBatch], y[kBatch], more[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const int f = base + k * blockDim.x;
            const bool inside = f < limit;
            v[k] = inside ? values[f] : zero;
            n[k] = inside ? norms[f] : zero;
            y[k] = inside && m.added.out != nullptr ? reinterpret_cast<const float4*>(m.added.y + row)[f] : zero;
            more[k] = inside && m.added.gate != nullptr ? reinterpret_cast<const float4*>(m.added.more + row)[f] : zero;
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            const int f = base + k * blockDim.x;
            if (m.added.out != nullptr) {
                if (m.added.gate != nullptr)
                    y[k] = make_float4(y[k].x + gate * more[k].x, y[k].y + gate * more[k].y, y[k].z + gate * more[k].z,
                                       y[k].w + gate * more[k].w);
                v[k] = make_float4(add_to(v[k].x, c, y[k].x), add_to(v[k].y, c, y[k].y), add_to(v[k].z, c, y[k].z),
                                   add_to(v[k].w, c, y[k].w));
                if (blockIdx.x == 0 && f < limit) reinterpret_cast<float4*>(m.added.out + at)[f] = v[k];
            }
            sum = fused(v[k].w, v[k].w, fused(v[k].z, v[k].z, fused(v[k].y, v[k].y, fused(v[k].x, v[k].x, sum))));
            if (f < fours)
                room[place(f)] = make_float4(v[k].x * (1.0f + n[k].x), v[k].y * (1.0f + n[k].y),
                                             v[k].z * (1.0f + n[k].z), v[k].w * (1.0f + n[k].w));
        }
    }
    return sum;
}

// Columns of stream s, times 1 + norm, into shared memory; the inverse root mean square of each row to `inverses`.
template <int T>
__device__ void stage_stream(const Mixer& m, int s, int padded, float* x, float* inverses, float* room) {
    for (int t = 0; t < T; ++t) {
        const int from = min(t, m.rows - 1);
        const long long at = (static_cast<long long>(from) * m.streams + s) * m.columns;
        const float c = m.added.out == nullptr ? 0.0f : m.added.c[from * m.streams + s];
        const float gate = m.added.gate == nullptr ? 0.0f : sigmoid(m.added.gate[from]);
        float sum = m.columns % 4 == 0 ? stage_fours(m, s, at, from, c, gate, padded / 4, x + t * padded)
                                       : stage_ones(m, s, at, from, c, gate, padded, x + t * padded);
        sum = block_sum(sum, room + (t & 1) * 32);
        inverses[t] = 1.0f / sqrtf(sum / static_cast<float>(m.columns) + m.eps);
    }
}

// Grid (blocks of kWarps x R rows of down and inject, S), 128 threads. Shared memory: T x padded columns.
template <int T, int R, int kAhead>
__device__ void mix_down(const Mixer& m, int padded, float* x) {
    __shared__ float room[2 * 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s = blockIdx.y;
    const int groups = (m.down.rows + R - 1) / R, all = groups + (m.inject.rows + R - 1) / R;
    const int group = blockIdx.x * (blockDim.x >> 5) + warp;
    const bool is_inject = group >= groups && m.inject.rows > 0;
    const Matrix w = is_inject ? m.inject : m.down;
    const int row = (is_inject ? group - groups : min(group, groups - 1)) * R, size = bytes_of(w.format);
    const int limit = m.columns * size, end = (limit + kStep - 1) / kStep * kStep;
    int lines[R];
    float acc[R][T], inverses[T];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        lines[r] = min(row + r, w.rows - 1);
#pragma unroll
        for (int t = 0; t < T; ++t) acc[r][t] = 0.0f;
    }
    device::let_next_start();
    Batch<R, kAhead> batch;
    batch.load(w, lines, s * limit, limit, 0, end, lane);
    device::wait_for_previous();
    stage_stream<T>(m, s, padded, x, inverses, room);
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (int t = 0; t < m.rows; ++t) m.inverses[t * m.streams + s] = inverses[t];
    for (int start = 0; start < end; start += kAhead * kStep) {
        if (start > 0) batch.load(w, lines, s * limit, limit, start, end, lane);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            if (start + u * kStep >= end) break;
            multiply_any<T, R>(w.format, batch.raw[u], batch.scale[u], reinterpret_cast<const float4*>(x),
                               start + u * kStep + lane * 16, padded / 4, acc);
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int t = 0; t < T; ++t) {
            const float total = warp_sum(acc[r][t]) * inverses[t];
            if (lane == r * T + t && t < m.rows && row + r < w.rows && group < all)
                m.shares[(t * m.streams + s) * (m.rank + m.streams) + (is_inject ? m.rank : 0) + row + r] = total;
        }
}

__device__ __forceinline__ float sum_shares(const Mixer& m, int t, int i) {
    const int pitch = m.rank + m.streams;
    float total = m.shares[t * m.streams * pitch + i];
    for (int s = 1; s < m.streams; ++s) total += m.shares[(t * m.streams + s) * pitch + i];
    return total / static_cast<float>(m.streams);
}

// Grid: any number of blocks. A warp takes kColumns columns h and 4 streams at once. Shared memory: T x padded rank.
template <int T, int kColumns, int kAhead>
__device__ void mix_up(const Mixer& m, int padded, float* d) {
    constexpr int R = kColumns * 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int limit = m.rank * bytes_of(m.up.format), end = (limit + kStep - 1) / kStep * kStep;
    const int groups = (m.columns + kColumns - 1) / kColumns;
    device::let_next_start();
    bool is_staged = false;
    for (int base = blockIdx.x * warps; base < groups; base += gridDim.x * warps) {
        const int h = min(base + warp, groups - 1) * kColumns;
        float u = 0.0f;  // of column h + lane / T and row lane % T, in lanes that have one
        const int own_h = min(h + lane / T, m.columns - 1), own_t = min(lane % T, m.rows - 1);
        for (int first = 0; first < m.streams; first += 4) {
            int lines[R];
            float acc[R][T], mine[4];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int s = min(first + r % 4, m.streams - 1);
                lines[r] = s * m.columns + min(h + r / 4, m.columns - 1);
#pragma unroll
                for (int t = 0; t < T; ++t) acc[r][t] = 0.0f;
            }
            Batch<R, kAhead> batch;
            batch.load(m.up, lines, 0, limit, 0, end, lane);
            if (!is_staged) {
                device::wait_for_previous();
                for (int i = threadIdx.x; i < T * padded; i += blockDim.x) {
                    const int t = i / padded, f = i % padded;
                    d[t * padded + place(f >> 2) * 4 + (f & 3)] =
                        t < m.rows && f < m.rank ? silu(sum_shares(m, t, f)) : 0.0f;
                }
                if (m.c != nullptr && blockIdx.x == 0)
                    for (int i = threadIdx.x; i < m.rows * m.streams; i += blockDim.x)
                        m.c[i] = 2.0f * sigmoid(sum_shares(m, i / m.streams, m.rank + i % m.streams));
                __syncthreads();
                is_staged = true;
            }
            float n[4];  // read before the products, not after them
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int s = min(first + i, m.streams - 1);
                const float* x = m.added.out == nullptr ? m.x : m.added.out;
                n[i] = x[(static_cast<long long>(own_t) * m.streams + s) * m.columns + own_h] *
                       m.inverses[own_t * m.streams + s] * (1.0f + m.norm[s * m.columns + own_h]);
            }
            for (int start = 0; start < end; start += kAhead * kStep) {
                if (start > 0) batch.load(m.up, lines, 0, limit, start, end, lane);
#pragma unroll
                for (int ahead = 0; ahead < kAhead; ++ahead) {
                    if (start + ahead * kStep >= end) break;
                    multiply_any<T, R>(m.up.format, batch.raw[ahead], batch.scale[ahead],
                                       reinterpret_cast<const float4*>(d), start + ahead * kStep + lane * 16, padded / 4,
                                       acc);
                }
            }
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int t = 0; t < T; ++t) {
                    const float total = warp_sum(acc[r][t]);
                    if (lane == r / 4 * T + t) mine[r % 4] = total;
                }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i < m.streams) u = fused(sigmoid(mine[i]), n[i], u);
        }
        const int column = h + lane / T, t = lane % T;
        if (lane < kColumns * T && column < m.columns && t < m.rows && base + warp < groups)
            m.u[static_cast<long long>(t) * m.columns + column] = u / static_cast<float>(m.streams);
    }
}

#define STRATA_MIXER(T, R, DOWN_AHEAD, COLUMNS, UP_AHEAD)                                                  \
    extern "C" __global__ void __launch_bounds__(128) mix_down_##T(const Mixer m, int padded) {           \
        extern __shared__ float4 room[];                                                                  \
        mix_down<T, R, DOWN_AHEAD>(m, padded, reinterpret_cast<float*>(room));                             \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) mix_up_##T(const Mixer m, int padded) {             \
        extern __shared__ float4 room[];                                                                  \
        mix_up<T, COLUMNS, UP_AHEAD>(m, padded, reinterpret_cast<float*>(room));                           \
    }

STRATA_MIXER(1, 2, 4, 2, 1)
STRATA_MIXER(2, 2, 4, 1, 1)
STRATA_MIXER(4, 2, 2, 1, 1)
STRATA_MIXER(8, 2, 1, 1, 1)

// x_s + c_s * y.
extern "C" __global__ void hyper_add(const float* x, const float* c, const float* y, int rows, int streams, int columns,
                                     float* out) {
    device::wait_for_previous();
    const int total = rows * streams * columns;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        const int row = i / columns;
        out[i] = add_to(x[i], c[row], y[static_cast<long long>(row / streams) * columns + i % columns]);
    }
}

// Grid (T x S), 1024 threads: the gate of one stream of one row and what it lets through. One pass reads everything and
// makes all four sums, of which the norms and the gate are factored out: sum(k r (1 + a) x s (1 + b)) is
// r s sum(k (1 + a) x (1 + b)), and the sum of squares of what passes is gate^2 times that of the values.
extern "C" __global__ void ngram_gate(const float* key, const float* value, const float* x, const float* norm_key,
                                      const float* norm_query, const float* norm_conv, float eps, int streams,
                                      int columns, float* gated, float* normed) {
    constexpr int kAhead = 4;
    __shared__ float room[4][32];
    const long long at = static_cast<long long>(blockIdx.x) * columns, from = blockIdx.x / streams * columns;
    const int norm = blockIdx.x % streams * columns, stride = kAhead * blockDim.x;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float width = static_cast<float>(columns);
    float weights[3][kAhead], values[kAhead], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto load_weights = [&](int first) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int i = min(first + u * static_cast<int>(blockDim.x), columns - 1);
            weights[0][u] = norm_key[norm + i], weights[1][u] = norm_query[norm + i];
            weights[2][u] = norm_conv[norm + i];
        }
    };
    device::let_next_start();
    load_weights(threadIdx.x);
    device::wait_for_previous();
    for (int first = threadIdx.x; first < columns; first += stride) {
        float keys[kAhead], queries[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int i = first + u * blockDim.x;
            const bool is_inside = i < columns;
            keys[u] = is_inside ? key[at + i] : 0.0f, queries[u] = is_inside ? x[at + i] : 0.0f;
            values[u] = is_inside ? value[from + i] : 0.0f;
        }
        if (first >= stride) load_weights(first);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            sums[0] = fused(keys[u], keys[u], sums[0]), sums[1] = fused(queries[u], queries[u], sums[1]);
            sums[2] = fused(keys[u] * (1.0f + weights[0][u]), queries[u] * (1.0f + weights[1][u]), sums[2]);
            sums[3] = fused(values[u], values[u], sums[3]);
        }
    }
#pragma unroll
    for (int kind = 0; kind < 4; ++kind) sums[kind] = warp_sum(sums[kind]);
    if (lane == 0)
        for (int kind = 0; kind < 4; ++kind) room[kind][warp] = sums[kind];
    __syncthreads();
    const bool is_warp = lane < static_cast<int>(blockDim.x >> 5);
#pragma unroll
    for (int kind = 0; kind < 4; ++kind) sums[kind] = warp_sum(is_warp ? room[kind][lane] : 0.0f);
    const float of_keys = 1.0f / sqrtf(sums[0] / width + eps), of_queries = 1.0f / sqrtf(sums[1] / width + eps);
    const float match = sums[2] * of_keys * of_queries / sqrtf(width), size = sqrtf(fmaxf(fabsf(match), 1e-6f));
    const float gate = sigmoid(match > 0.0f ? size : match < 0.0f ? -size : match == 0.0f ? 0.0f : match);
    const float inverse = 1.0f / sqrtf(gate * gate * sums[3] / width + eps);
    const bool is_one_pass = columns <= stride;  // then what was read is still here
    for (int first = threadIdx.x; first < columns; first += stride) {
        if (!is_one_pass) load_weights(first);
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int i = first + u * blockDim.x;
            if (i >= columns) break;
            const float passed = gate * (is_one_pass ? values[u] : value[from + i]);
            gated[at + i] = passed;
            normed[at + i] = passed * inverse * (1.0f + weights[2][u]);
        }
    }
}
