// Products of up to 8 rows of activations in shared memory with rows of a dense weight (q8_0, BF16, FP32), by a warp.
//
// A step is 512 bytes of a weight row, 16 a lane, so neighbouring lanes read neighbouring 16 bytes. Order of a sum: a
// lane takes its weights step by step in rising order (q8_0: the 16 products of a step first, then times their scale);
// the caller then sums over the warp's tree.
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

// A batch of weights: kAhead steps of R rows from byte `start` of a slice [offset, offset + limit) of each row. `at` of a
// lane is counted from the slice's start.
template <int R, int kAhead>
struct Batch {
    uint4 raw[kAhead][R];
    unsigned short scale[kAhead][R];

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

// Byte k of a word of q + 128, as q: 2^23 + byte is exact, and so is the difference.
__device__ __forceinline__ float signed_byte(unsigned word, int k) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u + k)) - 8388736.0f;
}

__device__ __forceinline__ void unpack(const uint4& raw, int j, int format, float* w) {
    if (format == kQ8) {
        const unsigned word = (j == 0 ? raw.x : j == 1 ? raw.y : j == 2 ? raw.z : raw.w) ^ 0x80808080u;
        for (int k = 0; k < 4; ++k) w[k] = signed_byte(word, k);
    } else if (format == kBf16) {
        const unsigned first = j == 0 ? raw.x : raw.z, second = j == 0 ? raw.y : raw.w;
        w[0] = device::bf16_low(first), w[1] = device::bf16_high(first);
        w[2] = device::bf16_low(second), w[3] = device::bf16_high(second);
    } else {
        w[0] = __uint_as_float(raw.x), w[1] = __uint_as_float(raw.y);
        w[2] = __uint_as_float(raw.z), w[3] = __uint_as_float(raw.w);
    }
}

// One step of R weight rows with T rows of activations; `f` is the lane's first float4, `pitch` float4s a row of x.
template <int T, int R, int kFormat>
__device__ __forceinline__ void multiply(const uint4* raw, const unsigned short* scales, const float4* x, int f,
                                         int pitch, float (*acc)[T]) {
    constexpr int kFours = kFormat == kQ8 ? 4 : kFormat == kBf16 ? 2 : 1;
    float dot[R][T];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int t = 0; t < T; ++t) dot[r][t] = kFormat == kQ8 ? 0.0f : acc[r][t];
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
        float4 a[T];
#pragma unroll
        for (int t = 0; t < T; ++t) a[t] = x[t * pitch + place(f + j)];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float w[4];
            unpack(raw[r], j, kFormat, w);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                dot[r][t] = fused(w[0], a[t].x, dot[r][t]);
                dot[r][t] = fused(w[1], a[t].y, dot[r][t]);
                dot[r][t] = fused(w[2], a[t].z, dot[r][t]);
                dot[r][t] = fused(w[3], a[t].w, dot[r][t]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const float scale = kFormat == kQ8 ? device::half_value(scales[r]) : 1.0f;
#pragma unroll
        for (int t = 0; t < T; ++t) acc[r][t] = kFormat == kQ8 ? fused(scale, dot[r][t], acc[r][t]) : dot[r][t];
    }
}

// One step in any format; `byte` is where the lane begins in its row, counted from where x begins.
template <int T, int R>
__device__ __forceinline__ void multiply_any(int format, const uint4* raw, const unsigned short* scales, const float4* x,
                                             int byte, int pitch, float (*acc)[T]) {
    if (format == kQ8)
        multiply<T, R, kQ8>(raw, scales, x, byte >> 2, pitch, acc);
    else if (format == kBf16)
        multiply<T, R, kBf16>(raw, scales, x, byte >> 3, pitch, acc);
    else
        multiply<T, R, kF32>(raw, scales, x, byte >> 4, pitch, acc);
}

__device__ __forceinline__ int bytes_of(int format) { return format == kQ8 ? 1 : format == kBf16 ? 2 : 4; }

}  // namespace rows
}  // namespace strata
