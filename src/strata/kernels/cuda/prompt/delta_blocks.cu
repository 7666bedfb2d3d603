// The gated delta rule over the rows of a prompt by blocks of 32, counted from the frame's start, on tensor cores.
//
// Within a block the changes d_i = beta_i (v_i - decayed k_i S - sum over j < i of A_ij d_j / beta_i) satisfy
// (I + A) d = beta (v - exp(l) k S), A_ij = beta_i exp(l_i - l_j) k_i . k_j below the diagonal, l the running sum of the
// log decays. With T = (I + A)^-1: d = U - W S, U = T beta v, W = T beta exp(l) k. `prepare` makes U and W of all blocks at
// once, and P_ij = exp(l_i - l_j) q_i . k_j; `scan` walks the blocks with the state in registers:
// o = exp(l) q S + P d; S = exp(l_32) S + (exp(l_32 - l) k)^T d. No exponent is above zero. Operands of products are BF16,
// sums, T, U and the state FP32 (decision record 0133). Rows outside [first, stop) change nothing.
#include "pairs.h"
#include "rows.h"

namespace strata {
namespace prompt {

constexpr int kRows = 32;
constexpr int kThreads = 128;
constexpr int kSmallPitch = 80;  // bytes of 32 BF16 values and 16 more: rows begin four banks apart

struct Blocks {
    const unsigned short *q, *k, *v;  // T x G x D twice, T x N x V; BF16
    const float *beta, *decay;        // T x N
    unsigned short *through, *within; // W: blocks x N x 32 x kWide; P: blocks x N x 32 x 32
    float *own, *decays;              // U turned: blocks x N x kWide x 32; exp(l) and exp(l_32 - l): blocks x N x 64
    float *state, *out;               // N x D x V, T x N x V
    int first, stop, key_heads, value_heads, key_width, value_width;
};

// 32 rows of a head, `width` BF16 values each, to shared memory; zeros where there is none.
template <int kWide>
__device__ __forceinline__ void bring_rows(const Blocks& a, const unsigned short* from, int heads, int head, int width,
                                           int block, unsigned char* to) {
    constexpr int kPitch = 2 * kWide + 16, kPieces = kWide / 8;
    for (int i = threadIdx.x; i < kRows * kPieces; i += blockDim.x) {
        const int row = block * kRows + i / kPieces, column = i % kPieces * 8;
        const bool there = row >= a.first && row < a.stop && column < width;
        const long long at = there ? (static_cast<long long>(row) * heads + head) * width + column : 0;
        tensor::copy_async(to + i / kPieces * kPitch + column * 2, from + at, there);
    }
}

template <int kWide>
__device__ __forceinline__ void prepare(const Blocks& a) {
    constexpr int kPitch = 2 * kWide + 16, kTiles = kWide / 8, kOwn = kTiles / 4;
    __shared__ uint4 room[3 * kRows * kPitch / 16];
    __shared__ uint4 small[3 * kRows * kSmallPitch / 16];
    __shared__ float system[kRows][kRows + 4], summed[kRows], betas[kRows];
    auto* const keys = reinterpret_cast<unsigned char*>(room);
    unsigned char *const queries = keys + kRows * kPitch, *const values = queries + kRows * kPitch;
    auto* const for_values = reinterpret_cast<unsigned char*>(small);
    unsigned char *const for_keys = for_values + kRows * kSmallPitch, *const inner = for_keys + kRows * kSmallPitch;
    const int block = a.first / kRows + blockIdx.x, head = blockIdx.y;
    const int key_head = head / (a.value_heads / a.key_heads);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const long long at = static_cast<long long>(block) * a.value_heads + head;
    bring_rows<kWide>(a, a.k, a.key_heads, key_head, a.key_width, block, keys);
    bring_rows<kWide>(a, a.q, a.key_heads, key_head, a.key_width, block, queries);
    bring_rows<kWide>(a, a.v, a.value_heads, head, a.value_width, block, values);
    tensor::commit_copies();
    if (warp == 0) {
        const int row = block * kRows + lane;
        const bool there = row >= a.first && row < a.stop;
        const long long own = static_cast<long long>(row) * a.value_heads + head;
        float sum = there ? a.decay[own] : 0.0f;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const float before = __shfl_up_sync(rows::kAll, sum, step);
            if (lane >= step) sum += before;
        }
        const float last = __shfl_sync(rows::kAll, sum, 31);
        summed[lane] = sum;
        betas[lane] = there ? a.beta[own] : 0.0f;
        a.decays[at * 64 + lane] = expf(sum);
        a.decays[at * 64 + 32 + lane] = expf(last - sum);
    }
    tensor::wait_for_copies<0>();
    __syncthreads();
    {  // k k^T by warps 0 and 1, q k^T by warps 2 and 3: 16 rows each
        const unsigned char* left = (warp >= 2 ? queries : keys) + (warp & 1) * 16 * kPitch;
        float sums[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < kWide / 32; ++step) {
            unsigned x[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[half][i] = *reinterpret_cast<const unsigned*>(left + (g + 8 * (i & 1)) * kPitch + step * 64 +
                                                                    half * 32 + (i >> 1) * 16 + t * 4);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                unsigned b[4];
                pairs::load(keys + n * 8 * kPitch + step * 64, kPitch, b);
                tensor::multiply(sums[n], x[0], b[0], b[1]);
                tensor::multiply(sums[n], x[1], b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = (warp & 1) * 16 + g + 8 * h, j = n * 8 + 2 * t;
                float found[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool below = warp >= 2 ? j + e <= i : j + e < i;
                    found[e] = below ? sums[n][2 * h + e] * expf(summed[i] - summed[j + e]) : 0.0f;
                    if (warp < 2) system[i][j + e] = betas[i] * found[e];
                }
                if (warp >= 2) *reinterpret_cast<unsigned*>(inner + i * kSmallPitch + j * 2) = pairs::rounded(found[0], found[1]);
            }
    }
    __syncthreads();
    if (warp == 0) {  // column `lane` of T, row after row
        float solved[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float parts[4] = {i == lane ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < i; ++j) parts[j & 3] = rows::fused(-system[i][j], solved[j], parts[j & 3]);
            solved[i] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
        }
        const float beta = betas[lane], both = beta * expf(summed[lane]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            *reinterpret_cast<unsigned short*>(for_values + i * kSmallPitch + lane * 2) =
                static_cast<unsigned short>(pairs::rounded(solved[i] * beta, 0.0f));
            *reinterpret_cast<unsigned short*>(for_keys + i * kSmallPitch + lane * 2) =
                static_cast<unsigned short>(pairs::rounded(solved[i] * both, 0.0f));
        }
    } else {
        for (int i = threadIdx.x - 32; i < kRows * 4; i += kThreads - 32)
            *reinterpret_cast<uint4*>(a.within + at * kRows * kRows + i * 8) =
                *reinterpret_cast<const uint4*>(inner + i / 4 * kSmallPitch + i % 4 * 16);
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; ++m) {  // W over the queries, which nobody reads any more; U turned
        unsigned x[2][2][4];
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[which][step][i] = *reinterpret_cast<const unsigned*>(
                        (which ? for_values : for_keys) + (m * 16 + g + 8 * (i & 1)) * kSmallPitch + step * 32 +
                        (i >> 1) * 16 + t * 4);
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
            const int tile = warp * kOwn + n, i = m * 16 + g, column = tile * 8 + 2 * t;
            float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                unsigned b[4];
                pairs::load_turned((which ? values : keys) + tile * 16, kPitch, b);
                tensor::multiply(sums[which], x[which][0], b[0], b[1]);
                tensor::multiply(sums[which], x[which][1], b[2], b[3]);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                *reinterpret_cast<unsigned*>(queries + (i + 8 * h) * kPitch + column * 2) =
                    pairs::rounded(sums[0][2 * h], sums[0][2 * h + 1]);
#pragma unroll
                for (int e = 0; e < 2; ++e) a.own[(at * kWide + column + e) * kRows + i + 8 * h] = sums[1][2 * h + e];
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kTiles; i += kThreads)
        *reinterpret_cast<uint4*>(a.through + at * kRows * kWide + i * 8) =
            *reinterpret_cast<const uint4*>(queries + i / kTiles * kPitch + i % kTiles * 16);
}

// A warp has 16 columns of a head's state, turned: they are the rows of its sums, keys the columns.
template <int kWide>
__device__ __forceinline__ void scan(const Blocks& a) {
    constexpr int kPitch = 2 * kWide + 16, kTiles = kWide / 8, kRoom = kRows * kPitch;
    constexpr int kStage = 3 * kRoom + kRows * kSmallPitch + 64 * 4;
    extern __shared__ uint4 room[];
    auto* const stages = reinterpret_cast<unsigned char*>(room);
    const int head = blockIdx.y, key_head = head / (a.value_heads / a.key_heads);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int column = (blockIdx.x * (blockDim.x >> 5) + warp) * 16 + g;  // of the state, and 8 more
    const int begin = a.first / kRows, end = (a.stop + kRows - 1) / kRows;
    auto bring = [&](int block) {
        if (block < end) {
            unsigned char* to = stages + (block & 1) * kStage;
            const long long at = static_cast<long long>(block) * a.value_heads + head;
            bring_rows<kWide>(a, a.q, a.key_heads, key_head, a.key_width, block, to);
            bring_rows<kWide>(a, a.k, a.key_heads, key_head, a.key_width, block, to + kRoom);
            for (int i = threadIdx.x; i < kRows * kTiles; i += blockDim.x)
                tensor::copy_async(to + 2 * kRoom + i / kTiles * kPitch + i % kTiles * 16,
                                   a.through + at * kRows * kWide + i * 8, true);
            for (int i = threadIdx.x; i < kRows * 4; i += blockDim.x)
                tensor::copy_async(to + 3 * kRoom + i / 4 * kSmallPitch + i % 4 * 16, a.within + at * kRows * kRows + i * 8,
                                   true);
            for (int i = threadIdx.x; i < 16; i += blockDim.x)
                tensor::copy_async(to + 3 * kRoom + kRows * kSmallPitch + i * 16, a.decays + at * 64 + i * 4, true);
        }
        tensor::commit_copies();
    };
    auto place = [&](int n, int i) {  // of a state's value
        return (static_cast<long long>(head) * a.key_width + n * 8 + 2 * t + (i & 1)) * a.value_width + column + 8 * (i >> 1);
    };
    auto inside = [&](int n, int i) {
        return n * 8 + 2 * t + (i & 1) < a.key_width && column + 8 * (i >> 1) < a.value_width;
    };
    bring(begin);
    float state[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[n][i] = inside(n, i) ? a.state[place(n, i)] : 0.0f;
    for (int block = begin; block < end; ++block) {
        const float* own = a.own + ((static_cast<long long>(block) * a.value_heads + head) * kWide + column) * kRows + 2 * t;
        float change[4][4], out[4][4], known[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 x = *reinterpret_cast<const float2*>(own + h * 8 * kRows + n * 8);
                change[n][2 * h] = x.x, change[n][2 * h + 1] = x.y;
            }
        unsigned x[kTiles / 2][4];
#pragma unroll
        for (int step = 0; step < kTiles / 2; ++step) {
            x[step][0] = pairs::rounded(state[2 * step][0], state[2 * step][1]);
            x[step][1] = pairs::rounded(state[2 * step][2], state[2 * step][3]);
            x[step][2] = pairs::rounded(state[2 * step + 1][0], state[2 * step + 1][1]);
            x[step][3] = pairs::rounded(state[2 * step + 1][2], state[2 * step + 1][3]);
        }
        tensor::wait_for_copies<0>();
        __syncthreads();
        bring(block + 1);
        const unsigned char* queries = stages + (block & 1) * kStage;
        const unsigned char *keys = queries + kRoom, *through = keys + kRoom, *within = through + kRoom;
        const auto* decays = reinterpret_cast<const float*>(within + kRows * kSmallPitch);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) known[n][i] = out[n][i] = 0.0f;
#pragma unroll
        for (int step = 0; step < kTiles / 4; ++step)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                unsigned b[4];
                pairs::load(through + n * 8 * kPitch + step * 64, kPitch, b);
                tensor::multiply(known[n], x[2 * step], b[0], b[1]);
                tensor::multiply(known[n], x[2 * step + 1], b[2], b[3]);
                pairs::load(queries + n * 8 * kPitch + step * 64, kPitch, b);
                tensor::multiply(out[n], x[2 * step], b[0], b[1]);
                tensor::multiply(out[n], x[2 * step + 1], b[2], b[3]);
            }
        unsigned changed[2][4], left[2][4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float before[2] = {decays[n * 8 + 2 * t], decays[n * 8 + 2 * t + 1]};
            const float after[2] = {decays[32 + n * 8 + 2 * t], decays[32 + n * 8 + 2 * t + 1]};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                change[n][i] -= known[n][i];
                out[n][i] *= before[i & 1];
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                changed[n >> 1][2 * (n & 1) + h] = pairs::rounded(change[n][2 * h], change[n][2 * h + 1]);
                left[n >> 1][2 * (n & 1) + h] = pairs::rounded(change[n][2 * h] * after[0], change[n][2 * h + 1] * after[1]);
            }
        }
        const float kept = decays[31];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            unsigned b[4];
            pairs::load(within + n * 8 * kSmallPitch, kSmallPitch, b);
            tensor::multiply(out[n], changed[0], b[0], b[1]);
            tensor::multiply(out[n], changed[1], b[2], b[3]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) state[n][i] *= kept;
            unsigned b[4];
            pairs::load_turned(keys + n * 16, kPitch, b);
            tensor::multiply(state[n], left[0], b[0], b[1]);
            tensor::multiply(state[n], left[1], b[2], b[3]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = block * kRows + n * 8 + 2 * t + (i & 1), to = column + 8 * (i >> 1);
                if (row >= a.first && row < a.stop && to < a.value_width)
                    a.out[(static_cast<long long>(row) * a.value_heads + head) * a.value_width + to] = out[n][i];
            }
        // No barrier here: the next block's is passed before anyone brings rows over these.
    }
    tensor::wait_for_copies<0>();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (inside(n, i)) a.state[place(n, i)] = state[n][i];
}

}  // namespace prompt
}  // namespace strata

#define STRATA_DELTA(wide)                                                                              \
    extern "C" __global__ void __launch_bounds__(128) prepare_##wide(strata::prompt::Blocks a) {        \
        strata::prompt::prepare<wide>(a);                                                               \
    }                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128) scan_##wide(strata::prompt::Blocks a) {           \
        strata::prompt::scan<wide>(a);                                                                  \
    }
STRATA_DELTA(32)
STRATA_DELTA(64)
STRATA_DELTA(128)
