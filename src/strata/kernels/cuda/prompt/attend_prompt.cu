// Sparse attention of a prompt: which blocks of earlier tokens each row attends, and the attention over them.
//
// One block of threads has one row, and of attention one key/value head with all query heads that read it, at most 16:
// they are the 16-row operand. Keys are walked in rising order of position in tiles of 32 from the first one listed, so a
// row's result depends on its own list alone.
#include "rows.h"
#include "tensor.h"

namespace strata {
namespace prompt {

constexpr int kThreads = 128;  // of attention
constexpr int kWarps = kThreads / 32;
constexpr int kKeys = 32;      // of a tile
constexpr int kHeads = 16;
constexpr int kSelecting = 256;
constexpr int kBins = 256;

// The complete blocks that row `first + blockIdx.x` attends, rising, -1 behind them: all that it sees, or the `most` of
// them by (score descending, number ascending).
__device__ __forceinline__ void select(const float* scores, int blocks, int start, int first, int block, int most,
                                       int* listed) {
    __shared__ int histogram[kBins], chosen[2], counts[kSelecting / 32][2];
    const int row = first + blockIdx.x, visible = min(blocks, (start + row + 1) / block);
    const float* own = scores + static_cast<long long>(row) * blocks;
    int* to = listed + static_cast<long long>(row) * most;
    if (visible <= most) {
        for (int i = threadIdx.x; i < most; i += kSelecting) to[i] = i < visible ? i : -1;
        return;
    }
    unsigned prefix = 0;  // the upper bits of the last one chosen
    int wanted = most;    // among those with these bits
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < kBins; i += kSelecting) histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < visible; i += kSelecting) {
            const unsigned key = rows::ordered(own[i]);
            if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&histogram[key >> shift & 255u], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int left = wanted, bin = kBins - 1;
            while (histogram[bin] < left) left -= histogram[bin--];
            chosen[0] = bin, chosen[1] = left;
        }
        __syncthreads();
        prefix = prefix << 8 | static_cast<unsigned>(chosen[0]);
        wanted = chosen[1];
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int taken = 0, equals = 0;  // before this part
    for (int base = 0; base < visible; base += kSelecting) {
        const int i = base + threadIdx.x;
        const unsigned key = i < visible ? rows::ordered(own[i]) : 0u;
        const bool above = i < visible && key > prefix, equal = i < visible && key == prefix;
        const unsigned all_above = __ballot_sync(rows::kAll, above), all_equal = __ballot_sync(rows::kAll, equal);
        if (lane == 0) counts[warp][0] = __popc(all_above), counts[warp][1] = __popc(all_equal);
        __syncthreads();
        int above_before = __popc(all_above & ((1u << lane) - 1)), equal_before = __popc(all_equal & ((1u << lane) - 1));
        int above_in_all = 0, equal_in_all = 0;
        for (int w = 0; w < kSelecting / 32; ++w) {
            if (w < warp) above_before += counts[w][0], equal_before += counts[w][1];
            above_in_all += counts[w][0], equal_in_all += counts[w][1];
        }
        const int rank = equals + equal_before;  // among the equal ones
        if (above || (equal && rank < wanted)) to[taken + above_before + min(wanted, rank) - min(wanted, equals)] = i;
        taken += above_in_all + min(wanted, equals + equal_in_all) - min(wanted, equals);
        equals += equal_in_all;
        __syncthreads();
    }
}

struct Sparse {
    const unsigned short *q, *k, *v;  // T x N x D, P x G x D twice; BF16
    const int* listed;                // T x most
    float* out;                       // T x N x D
    int start, first, most, block, heads, groups, width;
    float scale;
};

template <int kWide>
__device__ __forceinline__ void attend(const Sparse& a) {
    constexpr int kPitch = kWide * 2 % 128 == 0 ? kWide * 2 + 64 : kWide * 2;
    constexpr int kStage = 2 * kKeys * kPitch;
    constexpr int kSteps = kWide / 32;              // of a product of 32 values
    constexpr int kOwn = kWide / (8 * kWarps);      // columns of a warp, by eights
    constexpr int kChunks = kWide / 8;              // of 16 bytes, of a key
    extern __shared__ uint4 room[];
    auto* const stages = reinterpret_cast<unsigned char*>(room);
    auto* const scores = reinterpret_cast<float*>(stages + 2 * kStage);
    auto* const tokens = reinterpret_cast<int*>(scores + kHeads * (kKeys + 1));
    const int row = a.first + blockIdx.x, group = blockIdx.y, heads = a.heads / a.groups;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int position = a.start + row, complete = (position + 1) / a.block, count = min(complete, a.most);
    const int total = count * a.block + position + 1 - complete * a.block;
    const int* listed = a.listed + static_cast<long long>(row) * a.most;
    for (int i = threadIdx.x; i < total; i += kThreads)
        tokens[i] = i < count * a.block ? listed[i / a.block] * a.block + i % a.block
                                        : complete * a.block + i - count * a.block;
    unsigned query[kSteps][2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int head = g + 8 * (i & 1), column = step * 32 + t * 8 + half * 4 + (i >> 1) * 2;
                const long long at = (static_cast<long long>(row) * a.heads + group * heads + head) * a.width + column;
                query[step][half][i] =
                    head < heads && column < a.width ? *reinterpret_cast<const unsigned*>(a.q + at) : 0u;
            }
    __syncthreads();
    auto bring = [&](int tile) {
        if (tile * kKeys < total) {
            unsigned char* to = stages + (tile & 1) * kStage;
            for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
                const int key = i / kChunks, chunk = i % kChunks, number = tile * kKeys + key;
                const bool there = number < total && chunk * 8 < a.width;
                const int token = tokens[min(number, total - 1)];
                const long long at =
                    (static_cast<long long>(token) * a.groups + group) * a.width + (there ? chunk * 8 : 0);
                tensor::copy_async(to + key * kPitch + chunk * 16, a.k + at, there);
                tensor::copy_async(to + (kKeys + key) * kPitch + chunk * 16, a.v + at, there);
            }
        }
        tensor::commit_copies();
    };
    float sums[kOwn][4], largest[2] = {rows::lowest(), rows::lowest()}, weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kOwn; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    bring(0);
    for (int tile = 0; tile * kKeys < total; ++tile) {
        tensor::wait_for_copies<0>();
        __syncthreads();
        bring(tile + 1);
        const unsigned char* keys = stages + (tile & 1) * kStage;
        const unsigned char* values = keys + kKeys * kPitch;
        float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint4 x = *reinterpret_cast<const uint4*>(keys + (warp * 8 + g) * kPitch + step * 64 + t * 16);
            tensor::multiply(score, query[step][0], x.x, x.y);
            tensor::multiply(score, query[step][1], x.z, x.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[(g + 8 * (i >> 1)) * (kKeys + 1) + warp * 8 + 2 * t + (i & 1)] = score[i];
        __syncthreads();
        unsigned parts[2][4];
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float own[8], most = largest[h];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int key = (i >> 2) * 16 + (i >> 1 & 1) * 8 + 2 * t + (i & 1);
                own[i] = tile * kKeys + key < total ? scores[(g + 8 * h) * (kKeys + 1) + key] * a.scale : rows::lowest();
                most = fmaxf(most, own[i]);
            }
            most = fmaxf(most, __shfl_xor_sync(rows::kAll, most, 1));
            most = fmaxf(most, __shfl_xor_sync(rows::kAll, most, 2));
            keep[h] = device::exponential(largest[h] - most);
            largest[h] = most;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                own[i] = device::exponential(own[i] - most);
                sum += own[i];
            }
            weight[h] = rows::fused(weight[h], keep[h], sum);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                parts[j][h] = tensor::bf16_pair(own[4 * j], own[4 * j + 1]);
                parts[j][2 + h] = tensor::bf16_pair(own[4 * j + 2], own[4 * j + 3]);
            }
        }
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
            sums[n][0] *= keep[0], sums[n][1] *= keep[0], sums[n][2] *= keep[1], sums[n][3] *= keep[1];
            const unsigned char* column = values + (warp * kOwn + n) * 16;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned b0, b1;
                tensor::load_turned(column + j * 16 * kPitch, kPitch, b0, b1);
                tensor::multiply(sums[n], parts[j], b0, b1);
            }
        }
    }
    tensor::wait_for_copies<0>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        weight[h] += __shfl_xor_sync(rows::kAll, weight[h], 1);
        weight[h] += __shfl_xor_sync(rows::kAll, weight[h], 2);
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = g + 8 * (i >> 1), column = (warp * kOwn + n) * 8 + 2 * t + (i & 1);
            if (head < heads && column < a.width)
                a.out[(static_cast<long long>(row) * a.heads + group * heads + head) * a.width + column] =
                    sums[n][i] / weight[i >> 1];
        }
}

}  // namespace prompt
}  // namespace strata

extern "C" __global__ void __launch_bounds__(256)
    select_blocks(const float* scores, int blocks, int start, int first, int block, int most, int* listed) {
    strata::prompt::select(scores, blocks, start, first, block, most, listed);
}

extern "C" __global__ void __launch_bounds__(128) attend_32(strata::prompt::Sparse a) { strata::prompt::attend<32>(a); }
extern "C" __global__ void __launch_bounds__(128) attend_64(strata::prompt::Sparse a) { strata::prompt::attend<64>(a); }
extern "C" __global__ void __launch_bounds__(128) attend_128(strata::prompt::Sparse a) { strata::prompt::attend<128>(a); }
extern "C" __global__ void __launch_bounds__(128) attend_256(strata::prompt::Sparse a) { strata::prompt::attend<256>(a); }
