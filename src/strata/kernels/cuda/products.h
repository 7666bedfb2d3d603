// Products of 1 to 8 rows with dense weights, as a part of a launch: several matrices over the same rows.
//
// A warp computes R rows of a matrix for all rows of activations; kAhead steps of R rows are under way at once, the first
// of them before the activations are waited for. Activations lie in shared memory, in pieces of `chunk` columns if they
// do not fit whole; pieces are whole steps of every format, so they change no order.
#pragma once
#include "device.h"
#include "linear.h"
#include "rows.h"

namespace strata {
namespace rows {

constexpr int kMatrices = 8;  // linear_ops.py: MOST_MATRICES

// What the activations are: x, silu(gate) x, sigmoid(gate) x, or the gated norm of heads: weight rms(x) gate(z).
enum Source { kPlain, kSiluTimes, kSigmoidTimes, kNormSigmoid, kNormSilu };

// What a kernel is compiled for: rows as they are leave registers for weights under way; kAny asks `source`.
enum Kind { kAsIs, kAny };

// Column c of a row of the gate lies at c / gate_width * gate_pitch + c % gate_width.
struct Activations {
    const float *x, *gate, *weight;  // weight: of a norm's heads
    int source, rows, gate_width, gate_pitch, gate_row, gate_shift;  // gate_shift: of a gate_width that is a power of two, 31 of one head, else -1
    float eps;
    int by_fours;  // rows and gates may be read 16 bytes at once
};

struct Matrices {
    Matrix of[kMatrices];
    int count, groups, columns, chunk;  // chunk: a multiple of 512 columns
    int forms, unused;                  // of the staged rows
};

__device__ __forceinline__ float gated(const Activations& a, float x, float gate) {
    return (a.source == kSiluTimes ? silu(gate) : sigmoid(gate)) * x;
}

// The gated norm (delta.cu's operations, in its order) of heads of 128 columns, a warp a head; the reads of two heads
// are under way at once.
__device__ void stage_norm(const Activations& a, int t, int columns, int first, const Staged& room) {
    constexpr int kHeads = 2, kWidth = 128;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const long long row = static_cast<long long>(t) * columns;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 weight = reinterpret_cast<const float4*>(a.weight)[lane];
    const int heads = (min(first + room.columns, columns) - first) / kWidth;
    for (int head = warp; head < heads; head += kHeads * warps) {
        float4 values[kHeads], gates[kHeads];
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            const long long at = row + first + min(head + k * warps, heads - 1) * kWidth;
            values[k] = reinterpret_cast<const float4*>(a.x + at)[lane];
            gates[k] = reinterpret_cast<const float4*>(a.gate + at)[lane];
        }
#pragma unroll
        for (int k = 0; k < kHeads; ++k) {
            const float4 x = values[k], z = gates[k];
            const float sum = fused(x.w, x.w, fused(x.z, x.z, fused(x.y, x.y, x.x * x.x)));
            const float inverse = inverse_root(warp_sum(sum) / static_cast<float>(kWidth) + a.eps);
            const bool is_silu = a.source == kNormSilu;
            const float4 gate = make_float4(is_silu ? silu(z.x) : sigmoid(z.x), is_silu ? silu(z.y) : sigmoid(z.y),
                                            is_silu ? silu(z.z) : sigmoid(z.z), is_silu ? silu(z.w) : sigmoid(z.w));
            if (head + k * warps < heads)
                room.put(t, (head + k * warps) * (kWidth / 4) + lane,
                         make_float4(x.x * inverse * weight.x * gate.x, x.y * inverse * weight.y * gate.y,
                                     x.z * inverse * weight.z * gate.z, x.w * inverse * weight.w * gate.w));
        }
    }
    for (int f = heads * (kWidth / 4) + threadIdx.x; f < room.columns / 4; f += blockDim.x) room.put(t, f, zero);
}

// Four columns of a row from `column` on, gated if they are; zeros past the columns.
template <Kind kKind>
__device__ __forceinline__ float4 read_four(const Activations& a, const float* x, const float* gate, int column,
                                            int columns) {
    if (column >= columns) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a.by_fours) {
        const float4 v = *reinterpret_cast<const float4*>(x + column);
        if (kKind == kAsIs || a.source == kPlain) return v;
        const int head = a.gate_shift >= 0 ? column >> a.gate_shift : column / a.gate_width;
        const int at = head * (a.gate_pitch - a.gate_width) + column;
        const float4 g = *reinterpret_cast<const float4*>(gate + at);
        return make_float4(gated(a, v.x, g.x), gated(a, v.y, g.y), gated(a, v.z, g.z), gated(a, v.w, g.w));
    }
    float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < 4 && column + i < columns; ++i) {
        values[i] = x[column + i];
        if (kKind == kAny && a.source != kPlain)
            values[i] = gated(a, values[i],
                              gate[(column + i) / a.gate_width * a.gate_pitch + (column + i) % a.gate_width]);
    }
    return make_float4(values[0], values[1], values[2], values[3]);
}

// Columns [first, first + chunk) of T rows into shared memory; zeros past the columns and for rows that are not there.
template <int T, Kind kKind>
__device__ __forceinline__ void stage(const Activations& a, int columns, int first, const Staged& room) {
    constexpr int kBatch = 3;
    const int fours = room.columns / 4;
    for (int t = 0; t < T; ++t) {
        if (kKind == kAny && a.source >= kNormSigmoid && t < a.rows) {
            stage_norm(a, t, columns, first, room);
            continue;
        }
        const float* x = a.x + static_cast<long long>(t) * columns;
        const float* gate = a.gate + static_cast<long long>(t) * a.gate_row;
        for (int base = threadIdx.x; base < fours; base += kBatch * blockDim.x) {
            float4 v[kBatch];
#pragma unroll
            for (int k = 0; k < kBatch; ++k)
                v[k] = read_four<kKind>(a, x, gate, first + (base + k * static_cast<int>(blockDim.x)) * 4,
                                 t < a.rows ? columns : 0);
#pragma unroll
            for (int k = 0; k < kBatch; ++k)
                if (base + k * static_cast<int>(blockDim.x) < fours)  // the same for all lanes of a warp
                    room.put(t, base + k * blockDim.x, v[k]);
        }
    }
}

// By block `block` of `blocks`, at most as many as there are warps' groups. Shared memory: T staged rows of `chunk`
// columns. The caller has let the next launch start; this waits for the previous one.
template <int T, int R, int kAhead, Kind kKind>
__device__ __forceinline__ void linears(const Activations& a, const Matrices& all, int block, int blocks,
                                        float4* memory) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int pieces = (all.columns + all.chunk - 1) / all.chunk;
    const Staged room(memory, T, all.chunk, all.forms);
    bool is_staged = false;
    for (int sweep = 0; sweep < all.groups; sweep += blocks * warps) {
        // The last sweep is dealt backwards: the blocks that it does not reach are those that began with the slowest rows.
        const bool is_last = sweep > 0 && sweep + blocks * warps >= all.groups;
        const int base = sweep + (is_last ? blocks - 1 - block : block) * warps;
        if (base >= all.groups) break;
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
        const bool is_whole = m.is_aligned && m.row_bytes % kStep == 0 && pieces == 1, is_q8 = m.format == kQ8;
        WholeRows<R> rows(m, static_cast<long long>(row) * m.row_bytes + lane * 16, m.row_bytes);
        if (R > 1 && row + R > m.rows)  // the last rows: those that are not there are the last one again
#pragma unroll
            for (int r = 1; r < R; ++r) {
                const int back = row + r - lines[r];
                rows.data[r] -= static_cast<long long>(back) * m.row_bytes, rows.scales[r] -= back * (m.row_bytes / 32);
            }
        for (int piece = 0; piece < pieces; ++piece) {
            const int first = piece * all.chunk * size;
            const int end = min(first + all.chunk * size, (m.row_bytes + kStep - 1) / kStep * kStep);
            // Weights do not wait for the activations; where making those takes registers, they wait in the cache.
            Batch<R, kAhead> batch;
            if (kKind == kAsIs && is_whole && is_q8)
                batch.load(rows, end / kStep);
            else if (kKind == kAsIs && is_whole)
                batch.load_data(rows, end / kStep);
            else if (kKind == kAsIs)
                batch.load(m, lines, 0, m.row_bytes, first, end, lane);
            else if (!is_staged)
                for (int r = 0; r < R; ++r) prefetch(m, lines[r], first, end, lane);
            if (!is_staged || pieces > 1) {
                if (!is_staged) device::wait_for_previous();
                if (is_staged) __syncthreads();
                stage<T, kKind>(a, all.columns, piece * all.chunk, room);
                __syncthreads();
                is_staged = true;
            }
            if (is_whole) {
                if (is_q8)
                    multiply_rows<T, R, kAhead>(rows, batch, kKind == kAsIs, room, end / kStep, lane, acc);
                else if (m.format == kBf16)
                    multiply_float_rows<T, R, kAhead, kBf16>(rows, batch, kKind == kAsIs, room, end / kStep, lane, acc);
                else
                    multiply_float_rows<T, R, kAhead, kF32>(rows, batch, kKind == kAsIs, room, end / kStep, lane, acc);
                continue;
            }
            for (int start = first; start < end; start += kAhead * kStep) {
                if (start != first || kKind == kAny) batch.load(m, lines, 0, m.row_bytes, start, end, lane);
                multiply_batch<T, R, kAhead>(m.format, batch, room, start - first, end - first, lane, acc);
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
    if (!is_staged) device::wait_for_previous();  // a block without a group must not end before
}

}  // namespace rows
}  // namespace strata
