// Products of FP32 matrices on tensor cores: each operand is the sum of two BF16 values, and three of the four products of
// them are added in FP32; the one left out is below 2^-17 of a product (decision record 0134). For a router and the gates,
// whose FP32 weights a library multiplies on its FP32 units, and for the scores of index blocks: there columns come by
// segments, one a head, whose results are added in rising order where they are above zero.
//
// A block of threads has 64 rows and 64 outputs, a warp 32 of each; columns go by 32 in rising order, so that a result's
// bits depend on its row and its output alone.
#include "pairs.h"
#include "rows.h"

namespace strata {
namespace prompt {

constexpr int kThreads = 128;
constexpr int kTile = 64;
constexpr int kColumns = 32;  // at once
constexpr int kPitch = 2 * kColumns + 16;
constexpr int kPart = kTile * kPitch;
constexpr int kStage = 4 * kPart;  // rows and weights, larger and smaller parts
constexpr int kOwn = kTile * kColumns / 4 / kThreads;

struct Split {
    const float *x, *w[2];  // T x (segments * columns); O x columns, one matrix for each z of the grid
    float* y[2];            // T x O
    int rows, outputs, columns, segments;
    int positive;           // segments are added where they are above zero
    int start, first, stop, block;  // with block not 0: row t sees outputs below (start + t + 1) / block; others may stay unwritten
};

__device__ __forceinline__ void split(float4 x, uint2& large, uint2& small) {
    large = make_uint2(pairs::rounded(x.x, x.y), pairs::rounded(x.z, x.w));
    small = make_uint2(pairs::rounded(x.x - device::bf16_low(large.x), x.y - device::bf16_high(large.x)),
                       pairs::rounded(x.z - device::bf16_low(large.y), x.w - device::bf16_high(large.y)));
}

__device__ __forceinline__ void multiply_split(const Split& a) {
    __shared__ uint4 room[2 * kStage / 16];
    auto* const stages = reinterpret_cast<unsigned char*>(room);
    const int from_row = blockIdx.y * kTile, from_output = blockIdx.x * kTile;
    if (a.block != 0 && (from_row >= a.stop || from_row + kTile <= a.first ||
                         from_output >= (a.start + from_row + kTile) / a.block))
        return;
    const float* weights = blockIdx.z == 0 ? a.w[0] : a.w[1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int steps = (a.columns + kColumns - 1) / kColumns, pitch = a.segments * a.columns;
    float4 left[kOwn], right[kOwn];
    auto fetch = [&](int step) {
        const int segment = step / steps;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            const int i = threadIdx.x + j * kThreads, row = i / (kColumns / 4), column = step % steps * kColumns + i % (kColumns / 4) * 4;
            left[j] = right[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (column < a.columns && from_row + row < a.rows)
                left[j] = *reinterpret_cast<const float4*>(a.x + static_cast<long long>(from_row + row) * pitch +
                                                           segment * a.columns + column);
            if (column < a.columns && from_output + row < a.outputs)
                right[j] = *reinterpret_cast<const float4*>(weights + static_cast<long long>(from_output + row) * a.columns + column);
        }
    };
    auto store = [&](int step) {
        unsigned char* to = stages + (step & 1) * kStage;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            const int i = threadIdx.x + j * kThreads, at = i / (kColumns / 4) * kPitch + i % (kColumns / 4) * 8;
            uint2 large, small;
            split(left[j], large, small);
            *reinterpret_cast<uint2*>(to + at) = large;
            *reinterpret_cast<uint2*>(to + kPart + at) = small;
            split(right[j], large, small);
            *reinterpret_cast<uint2*>(to + 2 * kPart + at) = large;
            *reinterpret_cast<uint2*>(to + 3 * kPart + at) = small;
        }
    };
    float sums[2][4][4], total[2][4][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = total[m][n][i] = 0.0f;
    const int all = steps * a.segments;
    fetch(0);
    store(0);
    for (int step = 0; step < all; ++step) {
        __syncthreads();
        if (step + 1 < all) fetch(step + 1);
        const unsigned char* rows_at = stages + (step & 1) * kStage + (warp & 1) * 32 * kPitch;
        const unsigned char* outputs_at = stages + (step & 1) * kStage + 2 * kPart + (warp >> 1) * 32 * kPitch;
        unsigned x[2][2][2][4];  // m, part, 16 columns
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int part = 0; part < 2; ++part)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    unsigned b[4];
                    pairs::load(rows_at + part * kPart + (m * 16 + h * 8) * kPitch, kPitch, b);
                    x[m][part][0][h] = b[0], x[m][part][0][2 + h] = b[1];
                    x[m][part][1][h] = b[2], x[m][part][1][2 + h] = b[3];
                }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned large[4], small[4];
            pairs::load(outputs_at + n * 8 * kPitch, kPitch, large);
            pairs::load(outputs_at + kPart + n * 8 * kPitch, kPitch, small);
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    tensor::multiply(sums[m][n], x[m][1][k], large[2 * k], large[2 * k + 1]);
                    tensor::multiply(sums[m][n], x[m][0][k], small[2 * k], small[2 * k + 1]);
                    tensor::multiply(sums[m][n], x[m][0][k], large[2 * k], large[2 * k + 1]);
                }
        }
        if ((step + 1) % steps == 0)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float sum = sums[m][n][i];
                        total[m][n][i] += a.positive && sum < 0.0f ? 0.0f : sum;  // NaN stays one
                        sums[m][n][i] = 0.0f;
                    }
        if (step + 1 < all) store(step + 1);  // its place was read before the barrier
    }
    float* const y = blockIdx.z == 0 ? a.y[0] : a.y[1];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = from_row + (warp & 1) * 32 + m * 16 + g + 8 * (i >> 1);
                const int output = from_output + (warp >> 1) * 32 + n * 8 + 2 * t + (i & 1);
                if (row < a.rows && output < a.outputs) y[static_cast<long long>(row) * a.outputs + output] = total[m][n][i];
            }
}

}  // namespace prompt
}  // namespace strata

extern "C" __global__ void __launch_bounds__(128) split_product(strata::prompt::Split a) { strata::prompt::multiply_split(a); }
