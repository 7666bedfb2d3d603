// The routed experts of a prompt's chunk on tensor cores: gate, up and SiLU in one kernel, down in another, then the
// weighted sum in router order. Blobs are read where they lie and their weights dequantised in registers.
//
// Weights are the 16-row operand, rows of the prompt the 8-column one, so a tile of few rows costs little and a lane
// has whole scale groups. Lane 4 g + t has rows 2 g and 2 g + 1 of a group as its mma rows g and g + 8.
//   NVFP4  E2M1 x E4M3 is exact in BF16; weights come out 2^-8 too small, which the tensor scale puts right
//   Q8_0   codes are exact in BF16; the scale of a block of 32 multiplies the FP32 sum over it
//   BF16   as they are
// A row's result is the same bits in any tile, in any column of it and whatever the other rows hold.
#include "nvfp4.h"
#include "rows.h"
#include "tensor.h"

namespace strata {
namespace prompt {

constexpr int kRows = 64;     // of the prompt in a tile
constexpr int kColumns = 8;   // of an mma
constexpr int kTiles = kRows / kColumns;
constexpr int kGroup = 16;    // rows of weights that lie together
constexpr int kDepth = 64;    // weights of a row in a superblock
constexpr int kStages = 4;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// Calls `each(n)` for the live columns of a tile. A full one has no branch between them, so loads run ahead.
template <class Each>
__device__ __forceinline__ void for_columns(int live, Each each) {
    if (live == kTiles) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) each(n);
        return;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        if (n >= live) break;
        each(n);
    }
}

// Both groups of a warp with every live column, each of which is read from shared memory once.
__device__ __forceinline__ void multiply_rows(const unsigned (*a)[2][4], const unsigned char* column, int pitch, int live,
                                              float (*sums)[kTiles][4]) {
    for_columns(live, [&](int n) {
        const uint4 x = *reinterpret_cast<const uint4*>(column + n * kColumns * pitch);
#pragma unroll
        for (int j = 0; j < 2; ++j) tensor::multiply(sums[j][n], a[j][0], x.x, x.y);
#pragma unroll
        for (int j = 0; j < 2; ++j) tensor::multiply(sums[j][n], a[j][1], x.z, x.w);
    });
}

// Of one layer. Experts have their order of this chunk; picks (row * top_k + k) are sorted by expert.
struct Layer {
    const unsigned long long* address;  // of blobs, in order
    const int* order;                   // experts, in order
    const int* tiles;                   // tiles of rows before each, in order, and of all
    const int* first;                   // by expert: of its picks, and of all
    const int* picks;
    const float* scales;                // by expert: gate, up, down
    int hidden, intermediate;           // padded to 64
    int hidden_groups, inner_groups;    // of 16 rows of weights
    int top_k, from, to;                // range of the order that this launch computes
};

struct Nvfp4 {
    static constexpr int kBytes = 576;
    static constexpr bool kTogether = true;  // both groups of a warp at once, so that columns are read once
    static constexpr int kPitch = 144;
    static constexpr float kUnit = 256.0f;

    struct Weights {
        uint2 codes[2];
        unsigned scales;
    };

    static __device__ __forceinline__ void load(const unsigned char* block, int g, int t, Weights& to) {
        to.codes[0] = *reinterpret_cast<const uint2*>(block + (t * 2 * kGroup + 2 * g) * 4);
        to.codes[1] = *reinterpret_cast<const uint2*>(block + ((t * 2 + 1) * kGroup + 2 * g) * 4);
        to.scales = *reinterpret_cast<const unsigned short*>(block + 512 + t * kGroup + 2 * g);
    }

    template <int s>
    static __device__ __forceinline__ void step(const uint2& codes, const uint2& shifted, unsigned even, unsigned odd,
                                                unsigned* a) {
        constexpr int i = 2 * (s & 1);
        a[0] = tensor::scaled(nvfp4::pair<i>(codes.x, shifted.x), even);
        a[1] = tensor::scaled(nvfp4::pair<i>(codes.y, shifted.y), odd);
        a[2] = tensor::scaled(nvfp4::pair<i + 1>(codes.x, shifted.x), even);
        a[3] = tensor::scaled(nvfp4::pair<i + 1>(codes.y, shifted.y), odd);
    }

    static __device__ __forceinline__ void multiply(const Weights* weights, const unsigned char* rows, int g, int t,
                                                    int live, float (*sums)[kTiles][4]) {
        unsigned even[2], odd[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) even[j] = nvfp4::scale(weights[j].scales & 0xFFu), odd[j] = nvfp4::scale(weights[j].scales >> 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned a[2][2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint2 codes = weights[j].codes[half], shifted = make_uint2(codes.x << 4, codes.y << 4);
                step<0>(codes, shifted, even[j], odd[j], a[j][0]);
                step<1>(codes, shifted, even[j], odd[j], a[j][1]);
            }
            multiply_rows(a, rows + g * kPitch + t * 32 + half * 16, kPitch, live, sums);
        }
    }
};

struct Q8 {
    static constexpr int kBytes = 1088;
    static constexpr bool kTogether = false;  // registers do not hold both
    static constexpr int kPitch = 192;
    static constexpr float kUnit = 1.0f;

    struct Weights {
        uint2 codes[4];
        unsigned scales[2];
    };

    static __device__ __forceinline__ void load(const unsigned char* block, int g, int t, Weights& to) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to.codes[i] =
                *reinterpret_cast<const uint2*>(block + (((i >> 1) * 8 + t * 2 + (i & 1)) * kGroup + 2 * g) * 4);
#pragma unroll
        for (int b = 0; b < 2; ++b)
            to.scales[b] = *reinterpret_cast<const unsigned*>(block + 1024 + (b * kGroup + 2 * g) * 2);
    }

    // Bytes i and i + 1 of a word of signed codes.
    static __device__ __forceinline__ unsigned pair(unsigned word, int i) {
        const float low = static_cast<float>(static_cast<signed char>(word >> 8 * i));
        const float high = static_cast<float>(static_cast<signed char>(word >> (8 * i + 8)));
        return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
    }

    static __device__ __forceinline__ void multiply(const Weights& weights, const unsigned char* rows, int g, int t,
                                                    int live, float (*sums)[4]) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            unsigned a[2][4];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const uint2 codes = weights.codes[b * 2 + s];
                a[s][0] = pair(codes.x, 0), a[s][1] = pair(codes.y, 0);
                a[s][2] = pair(codes.x, 2), a[s][3] = pair(codes.y, 2);
            }
            const float even = device::half_value(static_cast<unsigned short>(weights.scales[b]));
            const float odd = device::half_value(static_cast<unsigned short>(weights.scales[b] >> 16));
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                if (n >= live) break;
                const uint4 x = *reinterpret_cast<const uint4*>(rows + (n * kColumns + g) * kPitch + b * 64 + t * 16);
                float block[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                tensor::multiply(block, a[0], x.x, x.y);
                tensor::multiply(block, a[1], x.z, x.w);
                sums[n][0] = rows::fused(block[0], even, sums[n][0]);
                sums[n][1] = rows::fused(block[1], even, sums[n][1]);
                sums[n][2] = rows::fused(block[2], odd, sums[n][2]);
                sums[n][3] = rows::fused(block[3], odd, sums[n][3]);
            }
        }
    }
};

struct Bf16 {
    static constexpr int kBytes = 2048;
    static constexpr bool kTogether = false;  // registers do not hold both
    static constexpr int kPitch = 144;
    static constexpr float kUnit = 1.0f;

    struct Weights {
        uint2 pairs[8];
    };

    static __device__ __forceinline__ void load(const unsigned char* block, int g, int t, Weights& to) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to.pairs[i] = *reinterpret_cast<const uint2*>(block + ((t * 8 + i) * kGroup + 2 * g) * 4);
    }

    static __device__ __forceinline__ void multiply(const Weights& weights, const unsigned char* rows, int g, int t,
                                                    int live, float (*sums)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2* pairs = weights.pairs + half * 4;
            const unsigned a[2][4] = {{pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y},
                                      {pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y}};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                if (n >= live) break;
                const uint4 x = *reinterpret_cast<const uint4*>(rows + (n * kColumns + g) * kPitch + t * 32 + half * 16);
                tensor::multiply(sums[n], a[0], x.x, x.y);
                tensor::multiply(sums[n], a[1], x.z, x.w);
            }
        }
    }
};

// One tile: an expert's rows, and in the order of experts where it stands.
struct Tile {
    int place, expert, first, rows;
};

__device__ __forceinline__ Tile find_tile(const Layer& layer, int number) {
    int low = layer.from, high = layer.to;  // the last place with tiles[place] <= number
    while (high - low > 1) {
        const int middle = (low + high) >> 1;
        if (layer.tiles[middle] <= number)
            low = middle;
        else
            high = middle;
    }
    Tile tile;
    tile.place = low, tile.expert = layer.order[low];
    tile.first = layer.first[tile.expert] + (number - layer.tiles[low]) * kRows;
    tile.rows = min(kRows, layer.first[tile.expert + 1] - tile.first);
    return tile;
}

// Sums of two groups of 16 weight rows (a warp's) with the tile's rows. `row_of(i)`: where row i of the tile begins.
template <class Format, class RowOf>
__device__ __forceinline__ void multiply_tile(const unsigned char* one, const unsigned char* other, int blocks,
                                              int rows, RowOf row_of, unsigned char* room, float (*sums)[kTiles][4]) {
    constexpr int kStage = kRows * Format::kPitch;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, live = (rows + kColumns - 1) / kColumns;
    const int part = (threadIdx.x & 7) * 16, own = threadIdx.x >> 3;
    const unsigned char* from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) from[i] = row_of(min(own + i * (kRows / 2), rows - 1)) + part;
    auto bring = [&](int block) {
        if (block < blocks) {
            unsigned char* to = room + block % kStages * kStage + own * Format::kPitch + part;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                tensor::copy_async(to + i * (kRows / 2) * Format::kPitch, from[i] + block * kDepth * 2,
                                   own + i * (kRows / 2) < rows);
        }
        tensor::commit_copies();
    };
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[0][n][i] = sums[1][n][i] = 0.0f;
    for (int block = 0; block < kStages - 1; ++block) bring(block);
    typename Format::Weights weights[2], next[2];
    if constexpr (Format::kTogether) next[1] = weights[1] = {};  // of one without the other
    if (one != nullptr) Format::load(one, g, t, weights[0]);
    if (other != nullptr) Format::load(other, g, t, weights[1]);
    for (int block = 0; block < blocks; ++block) {
        tensor::wait_for_copies<kStages - 2>();
        __syncthreads();
        bring(block + kStages - 1);
        const bool more = block + 1 < blocks;
        if (more && one != nullptr) Format::load(one + (block + 1) * Format::kBytes, g, t, next[0]);
        if (more && other != nullptr) Format::load(other + (block + 1) * Format::kBytes, g, t, next[1]);
        const unsigned char* stage = room + block % kStages * kStage;
        if constexpr (Format::kTogether) {
            if (one != nullptr) Format::multiply(weights, stage, g, t, live, sums);
        } else {
            if (one != nullptr) Format::multiply(weights[0], stage, g, t, live, sums[0]);
            if (other != nullptr) Format::multiply(weights[1], stage, g, t, live, sums[1]);
        }
        weights[0] = next[0], weights[1] = next[1];
    }
    tensor::wait_for_copies<0>();
    __syncthreads();  // the next tile's rows go where these were
}

template <class Format>
__device__ __forceinline__ void gate_up(const Layer& layer, const unsigned short* x, unsigned short* inner) {
    extern __shared__ uint4 room[];
    const int columns = (layer.inner_groups + kWarps - 1) / kWarps, base = layer.tiles[layer.from];
    const int count = (layer.tiles[layer.to] - base) * columns, blocks = layer.hidden / kDepth;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int work = blockIdx.x; work < count; work += gridDim.x) {
        const Tile tile = find_tile(layer, base + work / columns);
        const int group = work % columns * kWarps + (threadIdx.x >> 5);
        const auto* blob = reinterpret_cast<const unsigned char*>(layer.address[tile.place]);
        const unsigned char* gate = nullptr;
        if (group < layer.inner_groups) gate = blob + static_cast<long long>(2 * group) * blocks * Format::kBytes;
        float sums[2][kTiles][4];
        multiply_tile<Format>(
            gate, gate == nullptr ? nullptr : gate + blocks * Format::kBytes, blocks, tile.rows,
            [&](int row) {
                const long long token = layer.picks[tile.first + row] / layer.top_k;
                return reinterpret_cast<const unsigned char*>(x + token * layer.hidden);
            },
            reinterpret_cast<unsigned char*>(room), sums);
        if (gate == nullptr) continue;
        const float gate_scale = layer.scales[tile.expert * 3] * Format::kUnit;
        const float up_scale = layer.scales[tile.expert * 3 + 1] * Format::kUnit;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = n * kColumns + 2 * t + i;
                if (row >= tile.rows) continue;
                float h[2];
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    h[k] = rows::silu(sums[0][n][i + 2 * k] * gate_scale) * (sums[1][n][i + 2 * k] * up_scale);
                const long long at = static_cast<long long>(tile.first + row) * layer.intermediate + group * kGroup;
                *reinterpret_cast<unsigned*>(inner + at + 2 * g) = tensor::bf16_pair(h[0], h[1]);
            }
    }
}

// parts[pick] of each pick.
template <class Format>
__device__ __forceinline__ void down(const Layer& layer, const unsigned short* inner, unsigned short* parts) {
    extern __shared__ uint4 room[];
    const int columns = (layer.hidden_groups + 2 * kWarps - 1) / (2 * kWarps), base = layer.tiles[layer.from];
    const int count = (layer.tiles[layer.to] - base) * columns, blocks = layer.intermediate / kDepth;
    const long long before = 2LL * layer.inner_groups * (layer.hidden / kDepth) * Format::kBytes;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int work = blockIdx.x; work < count; work += gridDim.x) {
        const Tile tile = find_tile(layer, base + work / columns);
        const int group = 2 * (work % columns * kWarps + (threadIdx.x >> 5));
        const auto* blob = reinterpret_cast<const unsigned char*>(layer.address[tile.place]) + before;
        const unsigned char* from[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
            from[j] = group + j < layer.hidden_groups
                          ? blob + static_cast<long long>(group + j) * blocks * Format::kBytes
                          : nullptr;
        float sums[2][kTiles][4];
        multiply_tile<Format>(
            from[0], from[1], blocks, tile.rows,
            [&](int row) {
                const long long at = tile.first + row;
                return reinterpret_cast<const unsigned char*>(inner + at * layer.intermediate);
            },
            reinterpret_cast<unsigned char*>(room), sums);
        const float scale = layer.scales[tile.expert * 3 + 2] * Format::kUnit;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = n * kColumns + 2 * t + i;
                if (row >= tile.rows) continue;
                const long long pick = layer.picks[tile.first + row];
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (from[j] != nullptr)
                        *reinterpret_cast<unsigned*>(parts + pick * layer.hidden + (group + j) * kGroup + 2 * g) =
                            tensor::bf16_pair(sums[j][n][i] * scale, sums[j][n][i + 2] * scale);
            }
    }
}

}  // namespace prompt
}  // namespace strata

#define STRATA_PROMPT_EXPERTS(name, format)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                          \
        gate_up_##name(strata::prompt::Layer layer, const unsigned short* x, unsigned short* inner) {            \
        strata::prompt::gate_up<strata::prompt::format>(layer, x, inner);                                         \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                          \
        down_##name(strata::prompt::Layer layer, const unsigned short* inner, unsigned short* parts) {           \
        strata::prompt::down<strata::prompt::format>(layer, inner, parts);                                        \
    }

STRATA_PROMPT_EXPERTS(nvfp4, Nvfp4)
STRATA_PROMPT_EXPERTS(q8_0, Q8)
STRATA_PROMPT_EXPERTS(bf16, Bf16)

// y[row] = sum over k, in order, by fused multiply-add from zero, of weights[row, k] * parts[row, k]; 0 where a row has
// no experts (its ids are negative). Grid (rows, blocks).
extern "C" __global__ void sum_parts(const unsigned short* parts, const int* ids, const float* weights, int k, int pitch,
                                     int hidden, float* y) {
    const long long row = blockIdx.x;
    const int i = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= hidden) return;
    float low = 0.0f, high = 0.0f;
    if (ids[row * k] >= 0)
        for (int part = 0; part < k; ++part) {
            const unsigned both = *reinterpret_cast<const unsigned*>(parts + (row * k + part) * pitch + i);
            const float weight = weights[row * k + part];
            low = strata::rows::fused(weight, strata::device::bf16_low(both), low);
            high = strata::rows::fused(weight, strata::device::bf16_high(both), high);
        }
    y[row * hidden + i] = low;
    if (i + 1 < hidden) y[row * hidden + i + 1] = high;
}
