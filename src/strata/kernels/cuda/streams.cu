// Hyper-connections and the n-gram gate. `hyper_mix` is two launches: `mix_down` normalises and projects the streams to
// the low rank, a stream's share of each sum apart; `mix_up` sums the shares, projects up and mixes. Bytes of both are
// those of the weights: F x SH and SH x F (3.3 M weights each for 320 x 10,240: 0.8 us at 8 bits, 1.6 in BF16).
#include "device.h"
#include "linear.h"
#include "mixer.h"
#include "parts.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

// The case that models are made for, in as few instructions as it takes: 4 streams of whole steps, every matrix in q8_0 or
// every one in BF16.

// What a lane does with one row's steps of weights, in one format; `x` is the staged rows.
template <int T, int R, int kAhead, bool kIsQ8>
__device__ __forceinline__ void multiply_whole(WholeRows<R>& rows, Batch<R, kAhead>& batch, const Staged& x, int steps,
                                               int lane, float (*acc)[T]) {
    if constexpr (kIsQ8) {
        multiply_rows<T, R, kAhead>(rows, batch, true, x, steps, lane, acc);
    } else {
        // The places of a lane's two float4 of a step, the same in every step but for the step's own.
        const float4 *low = x.x + place(lane * 2), *high = x.x + place(lane * 2 + 1);
        for (int done = 0; done < steps; done += kAhead) {
            if (done > 0) batch.load_data(rows, steps - done);
#pragma unroll
            for (int u = 0; u < kAhead; ++u) {
                if (u >= steps - done) break;
#pragma unroll
                for (int t = 0; t < T; ++t)
                    multiply_bf16<R>(batch.raw[u], low[t * (x.columns / 4) + u * 64], high[t * (x.columns / 4) + u * 64],
                                     [&](int r) -> float& { return acc[r][t]; });
            }
            rows.advance(kAhead);
            low += kAhead * 64, high += kAhead * 64;
        }
    }
}

template <int T, bool kIsQ8>
__device__ void mix_down_whole(const Mixer& m, float4* memory) {
    constexpr int kAhead = kIsQ8 ? 5 : 10, kBytes = kIsQ8 ? 1 : 2;
    __shared__ float room[2 * 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s = blockIdx.y, columns = m.columns;
    const int row = blockIdx.x * (blockDim.x >> 5) + warp, all = m.down.rows + m.inject.rows;
    const bool is_inject = row >= m.down.rows && m.inject.rows > 0;
    const Matrix& w = is_inject ? m.inject : m.down;
    const int line = min(is_inject ? row - m.down.rows : row, w.rows - 1), fours = columns / 4;
    const int steps = columns * kBytes / kStep;
    const Staged x(memory, T, columns, kIsQ8 ? kCodes : kFloats);
    float acc[1][T], inverses[T];
#pragma unroll
    for (int t = 0; t < T; ++t) acc[0][t] = 0.0f;
    WholeRows<1> rows(w, static_cast<long long>(line) * w.row_bytes + s * columns * kBytes + lane * 16, 0);
    Batch<1, kAhead> batch;
    if (kIsQ8)
        batch.load(rows, steps);
    else
        batch.load_data(rows, steps);
    const int step = blockDim.x, own = threadIdx.x;
    const auto* norms = reinterpret_cast<const float4*>(m.norm + s * columns);
    float4 norm[kNorms];  // of this thread's first fours: weights, so they need not wait either
#pragma unroll
    for (int k = 0; k < kNorms; ++k)
        if (own + k * step < fours) norm[k] = norms[own + k * step];
    device::wait_for_previous();
    const bool is_added = m.added.out != nullptr, is_gated = m.added.gate != nullptr;
    for (int t = 0; t < T; ++t) {
        const int from = min(t, m.rows - 1), at = (from * 4 + s) * fours, plain = from * fours;
        const auto* xs = reinterpret_cast<const float4*>(m.x) + at;
        const auto* ys = reinterpret_cast<const float4*>(m.added.y) + plain;
        const auto* mores = reinterpret_cast<const float4*>(m.added.more) + plain;
        auto* outs = reinterpret_cast<float4*>(m.added.out) + at;
        float c = 0.0f, gate = 0.0f, sum = 0.0f;
        if (is_added) c = m.added.c[from * 4 + s];
        if (is_gated) gate = m.added.gate[from];
        for (int first = own; first < fours; first += kNorms * step) {
            float4 v[kNorms], y[kNorms], more[kNorms];
#pragma unroll
            for (int k = 0; k < kNorms; ++k) {
                const int f = first + k * step;
                if (f >= fours) break;  // the same for all lanes of a warp
                v[k] = xs[f];
                if (is_added) y[k] = ys[f];
                if (is_gated) more[k] = mores[f];
            }
            const float strength = is_gated ? sigmoid(gate) : 0.0f;
#pragma unroll
            for (int k = 0; k < kNorms; ++k) {
                const int f = first + k * step;
                if (f >= fours) break;
                const float4 n = first == own ? norm[k] : norms[f];
                if (is_gated)
                    y[k] = make_float4(y[k].x + strength * more[k].x, y[k].y + strength * more[k].y,
                                       y[k].z + strength * more[k].z, y[k].w + strength * more[k].w);
                if (is_added) {
                    v[k] = make_float4(add_to(v[k].x, c, y[k].x), add_to(v[k].y, c, y[k].y), add_to(v[k].z, c, y[k].z),
                                       add_to(v[k].w, c, y[k].w));
                    if (blockIdx.x == 0) outs[f] = v[k];
                }
                sum = fused(v[k].w, v[k].w, fused(v[k].z, v[k].z, fused(v[k].y, v[k].y, fused(v[k].x, v[k].x, sum))));
                const float4 normed = make_float4(fused(v[k].x, n.x, v[k].x), fused(v[k].y, n.y, v[k].y),
                                                  fused(v[k].z, n.z, v[k].z), fused(v[k].w, n.w, v[k].w));
                if (kIsQ8)
                    x.put_codes(t * fours + f, normed);
                else
                    x.x[t * fours + place(f)] = normed;
            }
        }
        inverses[t] = inverse_root(block_sum(sum, room + (t & 1) * 32) * m.share + m.eps);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (int t = 0; t < m.rows; ++t) m.inverses[t * 4 + s] = inverses[t];
    multiply_whole<T, 1, kAhead, kIsQ8>(rows, batch, x, steps, lane, acc);
#pragma unroll
    for (int t = 0; t < T; ++t) {
        const float total = warp_sum(acc[0][t]) * inverses[t];
        if (lane == t && t < m.rows && row < all) m.shares[(t * 4 + s) * all + row] = total;
    }
}

// A warp a column; lane 4 t + r is stream r of row t before and after the products. The low rank is at most one step of
// q8_0 or two of BF16; lanes behind its end read its last weights and count for nothing.
template <int T, bool kIsQ8>
__device__ void mix_up_whole(const Mixer& m, float4* memory) {
    constexpr int kSteps = kIsQ8 ? 1 : 2, kBytes = kIsQ8 ? 1 : 2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, limit = m.rank * kBytes;
    const int of_row = min(lane >> 2, m.rows - 1), of_stream = lane & 3, apart = m.columns * limit;
    const float* streams = m.added.out == nullptr ? m.x : m.added.out;
    const Staged d(memory, T, kStep, kIsQ8 ? kCodes : kFloats);
    bool is_staged = false;
    for (int base = blockIdx.x * warps; base < m.columns; base += gridDim.x * warps) {
        const int h = min(base + warp, m.columns - 1);
        Batch<4, kSteps> batch;
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
            const WholeRows<4> rows(m.up, static_cast<long long>(h) * limit + min(u * kStep + lane * 16, limit - 16), apart);
            if constexpr (kIsQ8)
                batch.load_step(rows, u);
            else
                batch.load_data_step(rows, u, 0);
        }
        const float norm = m.norm[of_stream * m.columns + h];
        if (!is_staged) device::wait_for_previous();
        const float x = streams[(of_row * 4 + of_stream) * m.columns + h], inverse = m.inverses[of_row * 4 + of_stream];
        if (!is_staged) {
            stage_shares<T>(m, d, m.rank);
            __syncthreads();
            is_staged = true;
        }
        float acc[4][T], mine = 0.0f;
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int t = 0; t < T; ++t) acc[r][t] = 0.0f;
        if constexpr (kIsQ8) {
            const int own = min(lane * 16, limit - 16);
            multiply_q8<T, 4, 1>(batch, reinterpret_cast<const uint4*>(d.high) + own / 16,
                                 reinterpret_cast<const uint4*>(d.low) + own / 16, d.units + own / 32, kStep, 1, acc);
        } else {
#pragma unroll
            for (int u = 0; u < kSteps; ++u) {
                if (u * kStep + lane * 16 >= limit) break;
                const int f = u * 64 + lane * 2;
#pragma unroll
                for (int t = 0; t < T; ++t)
                    multiply_bf16<4>(batch.raw[u], d.x[t * (kStep / 4) + place(f)], d.x[t * (kStep / 4) + place(f + 1)],
                                     [&](int r) -> float& { return acc[r][t]; });
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const float total = warp_sum(lane * 16 < limit ? acc[r][t] : 0.0f);
                if (lane == t * 4 + r) mine = total;
            }
        const float let_through = sigmoid(mine) * (x * inverse * (1.0f + norm));
        const float u = lanes_sum<4>(let_through) * 0.25f;
        if (of_stream == 0 && lane >> 2 < m.rows && base + warp < m.columns) m.u[of_row * m.columns + h] = u;
    }
}

#define STRATA_MIXER(T, FORMAT, IS_Q8)                                                                    \
    extern "C" __global__ void __launch_bounds__(512)                                                     \
        mix_down_##FORMAT##_##T(const Mixer m, int padded, const device::Ahead ahead) {                   \
        extern __shared__ float4 room[];                                                                  \
        device::let_next_start();                                                                         \
        device::bring(ahead);                                                                             \
        mix_down_whole<T, IS_Q8>(m, room);                                                                \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(640)                                                     \
        mix_up_##FORMAT##_##T(const Mixer m, int padded, const device::Ahead ahead) {                     \
        extern __shared__ float4 room[];                                                                  \
        device::let_next_start();                                                                         \
        device::bring(ahead);                                                                             \
        mix_up_whole<T, IS_Q8>(m, room);                                                                  \
    }

#if STRATA_IN(0)
STRATA_MIXER(1, bf16, false)
STRATA_MIXER(2, bf16, false)
STRATA_MIXER(4, bf16, false)
STRATA_MIXER(8, bf16, false)
#endif
#if STRATA_IN(1)
STRATA_MIXER(1, q8_0, true)
STRATA_MIXER(2, q8_0, true)
STRATA_MIXER(4, q8_0, true)
STRATA_MIXER(8, q8_0, true)
#endif

// Any other shape and format.
#define STRATA_ANY_MIXER(T, DOWN_AHEAD, UP_AHEAD)                                                         \
    extern "C" __global__ void __launch_bounds__(512)                                                     \
        mix_down_any_##T(const Mixer m, int padded, const device::Ahead ahead) {                          \
        extern __shared__ float4 room[];                                                                  \
        device::let_next_start();                                                                         \
        device::bring(ahead);                                                                             \
        mix_down<T, DOWN_AHEAD>(m, padded, room);                                                         \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(384)                                                     \
        mix_up_any_##T(const Mixer m, int padded, const device::Ahead ahead) {                            \
        extern __shared__ float4 room[];                                                                  \
        device::let_next_start();                                                                         \
        device::bring(ahead);                                                                             \
        mix_up<T, UP_AHEAD>(m, padded, room);                                                             \
    }

#if STRATA_IN(2)
STRATA_ANY_MIXER(8, 5, 1)
#endif

#if STRATA_IN(3)
STRATA_ANY_MIXER(1, 5, 2)


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
#endif
