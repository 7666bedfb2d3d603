// Products of up to 8 rows of activations in shared memory with rows of a dense weight (q8_0, BF16, FP32), by a warp.
//
// A step is 512 bytes of a weight row, 16 a lane, so neighbouring lanes read neighbouring 16 bytes. Order of a sum: a
// lane takes its weights step by step in rising order (q8_0: the integer sum of 16 products of a step first, then times
// scale and unit); the caller then sums over the warp's tree.
#pragma once
#include "device.h"
#include "rows.h"

namespace strata {
namespace rows {

constexpr int kStep = 512;    // bytes
enum Format { kF32, kBf16, kQ8 };

struct Matrix {
    const unsigned char* data;
    const unsigned short* scales;  // FP16, one for 32 weights
    float* y;                      // T x rows, where the product has a place of its own
    int rows, row_bytes, format, first;  // first: groups of rows before this matrix
    int is_aligned, unused;        // 16 bytes may be read at once wherever a lane begins
};

// Where float4 number f of a row of activations lies: lanes that read 64, 32 or 16 bytes each meet no bank twice.
__device__ __forceinline__ int place(int f) { return f ^ ((f >> 3) & 7); }

// 16 bytes of a row that need not be aligned, zeros past its end.
__device__ __forceinline__ uint4 load_pieces(const unsigned char* row, int at, int row_bytes) {
    unsigned words[4];
    for (int i = 0; i < 4; ++i) {
        words[i] = 0;
        for (int half = 0; half < 2; ++half) {
            const int byte = at + i * 4 + half * 2;
            if (byte < row_bytes)
                words[i] |= static_cast<unsigned>(*reinterpret_cast<const unsigned short*>(row + byte)) << 16 * half;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Where a lane begins in R rows of weights that are whole steps, 16 bytes at once (BF16 rows have no scales). What a warp does for a row is some
// hundred instructions, each waiting for the one before: no address is computed in a loop, no lane is asked about.
template <int R>
struct WholeRows {
    const unsigned char* data[R];
    const unsigned short* scales[R];

    // `at`: of the lane's first byte in row 0; rows are `apart` bytes apart, a multiple of 32.
    __device__ __forceinline__ WholeRows(const Matrix& m, long long at, int apart) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            data[r] = m.data + at + static_cast<long long>(r) * apart;
            scales[r] = m.scales + (at >> 5) + r * (apart / 32);
        }
    }

    __device__ __forceinline__ void advance(int steps) {
#pragma unroll
        for (int r = 0; r < R; ++r) data[r] += steps * kStep, scales[r] += steps * (kStep / 32);
    }
};

// A batch of weights: kAhead steps of R rows.
template <int R, int kAhead>
struct Batch {
    uint4 raw[kAhead][R];
    unsigned short scale[kAhead][R];

    __device__ __forceinline__ void load_step(const WholeRows<R>& rows, int u) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            raw[u][r] = device::load_once(rows.data[r] + u * kStep);
            scale[u][r] = rows.scales[r][u * (kStep / 32)];
        }
    }

    // Of BF16 rows, which have no scales: step `from` of the rows as step u of the batch.
    __device__ __forceinline__ void load_data_step(const WholeRows<R>& rows, int u, int from) {
#pragma unroll
        for (int r = 0; r < R; ++r) raw[u][r] = device::load_once(rows.data[r] + from * kStep);
    }

    __device__ __forceinline__ void load_data(const WholeRows<R>& rows, int steps) {
        if (steps >= kAhead) {
#pragma unroll
            for (int u = 0; u < kAhead; ++u) load_data_step(rows, u, u);
        } else {
#pragma unroll
            for (int u = 0; u < kAhead; ++u)
                if (u < steps) load_data_step(rows, u, u);
        }
    }

    // The first `steps` of them.
    __device__ __forceinline__ void load(const WholeRows<R>& rows, int steps) {
        if (steps >= kAhead) {
#pragma unroll
            for (int u = 0; u < kAhead; ++u) load_step(rows, u);
        } else {
#pragma unroll
            for (int u = 0; u < kAhead; ++u)
                if (u < steps) load_step(rows, u);
        }
    }

    // Of any format, from byte `start` of a slice [offset, offset + limit) of each row. `at` of a lane is counted from
    // the slice's start.
    __device__ __forceinline__ void load(const Matrix& m, const int* lines, int offset, int limit, int start, int end,
                                         int lane) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int at = start + u * kStep + lane * 16;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const unsigned char* from = m.data + static_cast<long long>(lines[r]) * m.row_bytes + offset;
                raw[u][r] = make_uint4(0, 0, 0, 0);
                scale[u][r] = 0;
                if (start + u * kStep < end && at < limit) {
                    raw[u][r] = m.is_aligned ? device::load_once(from + at) : load_pieces(from, at, limit);
                    if (m.format == kQ8)
                        scale[u][r] = m.scales[static_cast<long long>(lines[r]) * (m.row_bytes / 32) + (offset + at) / 32];
                }
            }
        }
    }
};

// Bytes [start, end) of a row, and its scales, on their way to the second-level cache.
__device__ __forceinline__ void prefetch(const Matrix& m, int line, int start, int end, int lane) {
    const unsigned char* row = m.data + static_cast<long long>(line) * m.row_bytes;
    for (int at = start + lane * 128; at < min(end, m.row_bytes); at += 32 * 128) device::prefetch(row + at);
    if (m.format == kQ8 && lane < (end - start) / 2048)
        device::prefetch(m.scales + static_cast<long long>(line) * (m.row_bytes / 32) + start / 32 + lane * 64);
}

// Rows of activations in shared memory: as FP32 for BF16 and FP32 weights, as 16-bit codes for q8_0 (decision record
// 0071: every 32 columns share a unit, a power of two; the bytes of the codes lie in two planes for byte products).
enum Forms { kFloats = 1, kCodes = 2 };

// The unit of 32 columns, by the bits of their largest magnitude.
struct Unit {
    float value, inverse;

    __device__ __forceinline__ explicit Unit(unsigned largest) {
        // The exponent as FP32 has it: at least that of 2^-100; from 2^96 on, or NaN, there is no unit.
        const unsigned exponent = max(largest >> 23, 27u);
        const bool is_coded = largest < 223u << 23;
        inverse = is_coded ? __uint_as_float((268u - exponent) << 23) : 0.0f;  // 2^(14 - e)
        value = __uint_as_float(is_coded ? (exponent - 14u) << 23 : 0x7FC00000u);
    }

    // The nearest code in the low 16 bits: 1.5 * 2^23 leaves no fraction, and rounds to even as the definition does.
    __device__ __forceinline__ unsigned code(float x) const {
        return __float_as_uint(fminf(x * inverse, 32767.0f) + 12582912.0f);
    }
};

struct Staged {
    float4* x;
    unsigned *high, *low;
    float* units;
    int columns, forms;  // columns: of a row, whole steps

    // Room is 16-byte aligned. Bytes: rows x columns x (4 if floats) + (2 + 1/8 if codes); linear_ops.py: staged_bytes.
    __device__ __forceinline__ Staged(float4* room, int rows, int columns, int forms) : columns(columns), forms(forms) {
        const int fours = rows * columns / 4;
        x = room;
        high = reinterpret_cast<unsigned*>((forms & kFloats) != 0 ? room + fours : room);
        low = high + fours;
        units = reinterpret_cast<float*>(low + fours);
    }

    // Column i of row t. All lanes of a warp call it together, with 32 neighbouring columns from a multiple of 32 on.
    __device__ __forceinline__ void put_one(int t, int i, float value) const {
        if ((forms & kFloats) != 0) reinterpret_cast<float*>(x + t * (columns / 4) + place(i >> 2))[i & 3] = value;
        if ((forms & kCodes) == 0) return;
        const Unit unit(warp_largest(__float_as_uint(value) & 0x7FFFFFFFu));
        const unsigned code = unit.code(value);
        const int at = t * columns + i;
        reinterpret_cast<unsigned char*>(low)[at] = static_cast<unsigned char>(code);
        reinterpret_cast<unsigned char*>(high)[at] = static_cast<unsigned char>(code >> 8);
        if ((i & 31) == 0) units[at >> 5] = unit.value;
    }

    // Four columns of row t from column 4 f on. All lanes of a warp call it together, with neighbouring f.
    __device__ __forceinline__ void put(int t, int f, const float4& v) const {
        if ((forms & kFloats) != 0) x[t * (columns / 4) + place(f)] = v;
        if ((forms & kCodes) != 0) put_codes(t * (columns / 4) + f, v);
    }

    // `at`: of the four among those of all rows.
    __device__ __forceinline__ void put_codes(int at, const float4& v) const {
        const unsigned whole = 0x7FFFFFFFu;
        unsigned largest = max(max(__float_as_uint(v.x) & whole, __float_as_uint(v.y) & whole),
                               max(__float_as_uint(v.z) & whole, __float_as_uint(v.w) & whole));
#pragma unroll
        for (int step = 4; step > 0; step >>= 1) {
            const unsigned other = __shfl_xor_sync(0xFFFFFFFFu, largest, step);
            largest = other > largest ? other : largest;
        }
        const Unit unit(largest);
        const unsigned first = __byte_perm(unit.code(v.x), unit.code(v.y), 0x5140);
        const unsigned second = __byte_perm(unit.code(v.z), unit.code(v.w), 0x5140);
        low[at] = __byte_perm(first, second, 0x5410);
        high[at] = __byte_perm(first, second, 0x7632);
        if ((at & 7) == 0) units[at >> 3] = unit.value;
    }
};

// Steps [0, steps) of a batch of q8_0 rows with T rows of codes from a column on: `high`, `low` and `units` are where this
// lane begins. Exact integers, then one FMA.
template <int T, int R, int kAhead>
__device__ __forceinline__ void multiply_q8(const Batch<R, kAhead>& batch, const uint4* high, const uint4* low,
                                            const float* units, int columns, int steps, float (*acc)[T]) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
        if (u >= steps) break;
        float scale[R];
#pragma unroll
        for (int r = 0; r < R; ++r) scale[r] = device::half_value(batch.scale[u][r]);
#pragma unroll
        for (int t = 0; t < T; ++t) {
            const uint4 h = high[t * (columns / 16) + u * (kStep / 16)], l = low[t * (columns / 16) + u * (kStep / 16)];
            const float unit = units[t * (columns / 32) + u * (kStep / 32)];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const uint4 q = batch.raw[u][r];
                int tops = __dp4a(static_cast<int>(q.x), static_cast<int>(h.x), 0);
                int dot = device::dot_mixed(q.x, l.x, 0);
                tops = __dp4a(static_cast<int>(q.y), static_cast<int>(h.y), tops);
                dot = device::dot_mixed(q.y, l.y, dot);
                tops = __dp4a(static_cast<int>(q.z), static_cast<int>(h.z), tops);
                dot = device::dot_mixed(q.z, l.z, dot);
                tops = __dp4a(static_cast<int>(q.w), static_cast<int>(h.w), tops);
                dot = device::dot_mixed(q.w, l.w, dot);
                acc[r][t] = fused(static_cast<float>(tops * 256 + dot), scale[r] * unit, acc[r][t]);
            }
        }
    }
}

// All steps of q8_0 rows with staged codes from `column` on. `is_loaded`: the first batch is under way.
template <int T, int R, int kAhead>
__device__ __forceinline__ void multiply_rows(WholeRows<R>& rows, Batch<R, kAhead>& batch, bool is_loaded, const Staged& x,
                                              int steps, int lane, float (*acc)[T]) {
    const uint4 *high = reinterpret_cast<const uint4*>(x.high) + lane, *low = reinterpret_cast<const uint4*>(x.low) + lane;
    const float* units = x.units + lane / 2;
    for (int done = 0; done < steps; done += kAhead) {
        if (done > 0 || !is_loaded) batch.load(rows, steps - done);
        multiply_q8<T, R, kAhead>(batch, high, low, units, x.columns, steps - done, acc);
        rows.advance(kAhead);
        high += kAhead * (kStep / 16), low += kAhead * (kStep / 16), units += kAhead * (kStep / 32);
    }
}

__device__ __forceinline__ void unpack(const uint4& raw, int j, int format, float* w) {
    if (format == kBf16) {
        const unsigned first = j == 0 ? raw.x : raw.z, second = j == 0 ? raw.y : raw.w;
        w[0] = device::bf16_low(first), w[1] = device::bf16_high(first);
        w[2] = device::bf16_low(second), w[3] = device::bf16_high(second);
    } else {
        w[0] = __uint_as_float(raw.x), w[1] = __uint_as_float(raw.y);
        w[2] = __uint_as_float(raw.z), w[3] = __uint_as_float(raw.w);
    }
}

// Eight BF16 weights of R rows with eight columns of one row, in order; `sum(r)` is the sum of row r.
template <int R, class Sum>
__device__ __forceinline__ void multiply_bf16(const uint4* raw, const float4& low, const float4& high, Sum sum) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const uint4 w = raw[r];
        float total = fused(device::bf16_low(w.x), low.x, sum(r));
        total = fused(device::bf16_high(w.x), low.y, total);
        total = fused(device::bf16_low(w.y), low.z, total);
        total = fused(device::bf16_high(w.y), low.w, total);
        total = fused(device::bf16_low(w.z), high.x, total);
        total = fused(device::bf16_high(w.z), high.y, total);
        total = fused(device::bf16_low(w.w), high.z, total);
        sum(r) = fused(device::bf16_high(w.w), high.w, total);
    }
}

// One step of R BF16 or FP32 rows with T rows of floats; `f` is the lane's first float4.
template <int T, int R, int kFormat>
__device__ __forceinline__ void multiply_floats(const uint4* raw, const Staged& x, int f, float (*acc)[T]) {
#pragma unroll
    for (int j = 0; j < (kFormat == kBf16 ? 2 : 1); ++j) {
        float4 a[T];
#pragma unroll
        for (int t = 0; t < T; ++t) a[t] = x.x[t * (x.columns / 4) + place(f + j)];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float w[4];
            unpack(raw[r], j, kFormat, w);
#pragma unroll
            for (int t = 0; t < T; ++t)
                acc[r][t] = fused(w[3], a[t].w, fused(w[2], a[t].z, fused(w[1], a[t].y, fused(w[0], a[t].x, acc[r][t]))));
        }
    }
}

// All steps of BF16 or FP32 rows with staged floats from their first column on. `is_loaded`: the first batch is under way.
// A step's place in the batch is asked for again as soon as it is used: no batch is waited for as a whole.
template <int T, int R, int kAhead, int kFormat>
__device__ __forceinline__ void multiply_float_rows(WholeRows<R>& rows, Batch<R, kAhead>& batch, bool is_loaded,
                                                    const Staged& x, int steps, int lane, float (*acc)[T]) {
    constexpr int kPieces = kFormat == kBf16 ? 2 : 1;  // float4 of a lane in a step
    if (!is_loaded) batch.load_data(rows, steps);
    for (int done = 0; done < steps; done += kAhead) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            if (done + u >= steps) break;
            multiply_floats<T, R, kFormat>(batch.raw[u], x, ((done + u) * 32 + lane) * kPieces, acc);
            if (done + u + kAhead < steps) batch.load_data_step(rows, u, u + kAhead);
        }
        rows.advance(kAhead);
    }
}

// The steps of a batch in [start, end), counted in bytes of a row from where x begins.
template <int T, int R, int kAhead, int kFormat>
__device__ __forceinline__ void multiply_steps(const Batch<R, kAhead>& batch, const Staged& x, int start, int end,
                                               int lane, float (*acc)[T]) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
        if (start + u * kStep >= end) break;
        const int byte = start + u * kStep + lane * 16;
        if constexpr (kFormat == kQ8) {
            Batch<R, 1> one;
#pragma unroll
            for (int r = 0; r < R; ++r) one.raw[0][r] = batch.raw[u][r], one.scale[0][r] = batch.scale[u][r];
            multiply_q8<T, R, 1>(one, reinterpret_cast<const uint4*>(x.high) + byte / 16,
                                 reinterpret_cast<const uint4*>(x.low) + byte / 16, x.units + byte / 32, x.columns, 1, acc);
        } else {
            multiply_floats<T, R, kFormat>(batch.raw[u], x, byte >> (kFormat == kBf16 ? 3 : 4), acc);
        }
    }
}

template <int T, int R, int kAhead>
__device__ __forceinline__ void multiply_batch(int format, const Batch<R, kAhead>& batch, const Staged& x, int start,
                                               int end, int lane, float (*acc)[T]) {
    if (format == kQ8)
        multiply_steps<T, R, kAhead, kQ8>(batch, x, start, end, lane, acc);
    else if (format == kBf16)
        multiply_steps<T, R, kAhead, kBf16>(batch, x, start, end, lane, acc);
    else
        multiply_steps<T, R, kAhead, kF32>(batch, x, start, end, lane, acc);
}

__device__ __forceinline__ int bytes_of(int format) { return format == kQ8 ? 1 : format == kBf16 ? 2 : 4; }

}  // namespace rows
}  // namespace strata
