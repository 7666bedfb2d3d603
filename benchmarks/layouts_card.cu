// Gate and up of NVFP4 experts for one row of activations, in the ways between which decision records 0010 and 0011 choose:
// where the scales lie (beside their codes, or apart from them by matrix) and how blocks are summed (in FP32 in the fixed
// order, or as integers in any order). Measurement kernels, in the shape of expert.cu's gate and up and with its loads and
// products; only what is compared differs. Compiled by layouts_card.py with the headers of expert.cu.
#include "exact.h"
#include "device.h"
#include "expert.h"

using namespace strata::experts;

constexpr int kZeroBytes = 256;  // before the codes, for lanes whose block is not the column's

// The layout of blobs: group by group, gate and up in turn, 576 bytes a superblock.
struct Beside {
    const unsigned char* at;
    __device__ __forceinline__ Beside(const unsigned char* expert, int wide, int, int group, int matrix)
        : at(expert + (static_cast<long long>(group) * 2 + matrix) * wide * 576) {}
    __device__ __forceinline__ void load(int segment, Nvfp4::Segment& to) const {
        Nvfp4::load(at + segment * 2 * 576, 8, to);
    }
};

// A matrix after the other; of each all codes in the same order, then all scales.
struct Apart {
    const unsigned char *codes, *scales;
    __device__ __forceinline__ Apart(const unsigned char* expert, int wide, int groups, int group, int matrix) {
        const long long superblocks = static_cast<long long>(groups) * wide, first = static_cast<long long>(group) * wide;
        const unsigned char* start = expert + matrix * superblocks * 576;
        codes = start + first * 512;
        scales = start + superblocks * 512 + first * 64;
    }
    __device__ __forceinline__ void load(int segment, Nvfp4::Segment& to) const {
        const int q = threadIdx.x & 3, quad = threadIdx.x >> 2 & 3;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const unsigned char* p = codes + (segment * 2 + s) * 512 + quad * 16 + q * 64;
            to.codes[s * 2] = strata::device::load_once(p);
            to.codes[s * 2 + 1] = strata::device::load_once(p + 256);
            to.scales[s] = load_word_once(scales + (segment * 2 + s) * 64 + q * 16 + quad * 4);
        }
    }
};

// The rule of exact.h: a sum a segment, segments added in order. `factors`: FP32 scales of the row's groups.
struct InOrder {
    float* sums;  // [segment][32]
    __device__ __forceinline__ explicit InOrder(void* room) : sums(static_cast<float*>(room)) {}

    __device__ __forceinline__ void add(const Nvfp4::Tables& tables, const Nvfp4::Segment& segment, int number,
                                        const Activations& x) {
        float acc[1] = {0.0f};
        add_blocks<Nvfp4, 1>(tables, segment, true, x, acc);
        sums[number * 32 + (threadIdx.x & 31)] = acc[0];
    }
    // All threads of the block; the result is the first warp's.
    __device__ __forceinline__ float finish(int segments, float tensor_scale, float) const {
        __syncthreads();
        float total = 0.0f;
        if (threadIdx.x < 32)
            for (int segment = 0; segment < segments; ++segment) total = sum(total, sums[segment * 32 + threadIdx.x]);
        return product(total, product(tensor_scale, kNvfp4Unit));
    }
};

// Integers: the dot product, times 15 bits of the group's scale above the row's one exponent (`factors`), times E4M3 in
// units of 2^-9 (18 bits): at most 55 bits for 160 blocks, so 64 bits hold every sum and their order means nothing.
struct AnyOrder {
    long long acc = 0;
    long long* sums;  // [warp][32]
    __device__ __forceinline__ explicit AnyOrder(void* room) : sums(static_cast<long long*>(room)) {}

    static __device__ __forceinline__ int whole_e4m3(unsigned code) {
        const int size = static_cast<int>(code >> 3), fraction = static_cast<int>(code & 7u);
        return size == 0 ? fraction : (8 + fraction) << (size - 1);
    }
    __device__ __forceinline__ void add(const Nvfp4::Tables& tables, const Nvfp4::Segment& segment, int,
                                        const Activations& x) {
        const int q = threadIdx.x & 3;
        const int zero[4] = {0, 0, 0, 0};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            // As Nvfp4::take_scales: row q of the quad, 4 blocks.
            unsigned word = segment.scales[s];
            word = permute(word, __shfl_xor_sync(kAll, word, 1), (q & 1) != 0 ? 0x3715u : 0x6240u);
            word = permute(word, __shfl_xor_sync(kAll, word, 2), (q & 2) != 0 ? 0x3276u : 0x5410u);
            const int4 four = *reinterpret_cast<const int4*>(x.scales + s * 4);
            const int factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = s * 2 + half;
                int dots[4];
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    Nvfp4::multiply(tables, segment, i, k, *reinterpret_cast<const int2*>(x.codes[k] + i * 32),
                                    k == 0 ? zero : dots, dots);
#pragma unroll
                for (int block = 0; block < 2; ++block) {
                    const int dot = (q & 1) != 0 ? dots[2 + block] : dots[block], at = half * 2 + block;
                    acc += static_cast<long long>(dot * factors[at]) * whole_e4m3(word >> (8 * at) & 0xFFu);
                }
            }
        }
    }
    __device__ __forceinline__ float finish(int, float tensor_scale, float row_unit) const {
        sums[threadIdx.x] = acc;
        __syncthreads();
        long long total = 0;
        if (threadIdx.x < 32)
            for (int at = threadIdx.x; at < static_cast<int>(blockDim.x); at += 32) total += sums[at];
        return product(static_cast<float>(total), product(tensor_scale, row_unit));
    }
};

// A block computes a group of 16 columns of gate and of up of one expert: out [experts, 2, groups * 16]. `wide`: superblocks
// of a row, an even number. `scales`: tensor scales [experts, 2]. Shared memory: layouts_card.py, `launch_of`.
template <class Layout, class Sum>
__device__ __forceinline__ void gate_up(const unsigned char* experts, long long stride, int wide, int groups,
                                        const unsigned* codes, const unsigned* factors, const float* scales,
                                        float row_unit, float* out) {
    extern __shared__ uint4 memory[];
    unsigned* const zeros = reinterpret_cast<unsigned*>(memory);
    unsigned *const own_codes = zeros + kZeroBytes / 4, *const own_factors = own_codes + wide * 16;
    const int lane = threadIdx.x & 31, q = lane & 3, segments = wide / 2;
    const int warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x >> 5), 0), warps = blockDim.x >> 5;
    const Layout weights(experts + blockIdx.y * stride, wide, groups, blockIdx.x, lane >> 4);
    Nvfp4::Segment segment[Nvfp4::kAhead];
    int next = warp;
#pragma unroll
    for (int i = 0; i < Nvfp4::kAhead; ++i, next += warps)
        if (next < segments) weights.load(next, segment[i]);
    for (int i = threadIdx.x; i < kZeroBytes / 4; i += blockDim.x) zeros[i] = 0;
    for (int i = threadIdx.x; i < wide * 16; i += blockDim.x) own_codes[i] = codes[i];
    for (int i = threadIdx.x; i < wide * 4; i += blockDim.x) own_factors[i] = factors[i];
    __syncthreads();
    // The lane's column of the activations, see expert.h.
    const int column = lane >> 3;
    const bool has_block = (lane >> 2 & 1) == q >> 1;
    const signed char* bases[2];
    int steps[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const bool is_there = has_block && column >> 1 == k;
        bases[k] = reinterpret_cast<const signed char*>(is_there ? own_codes : zeros + 8) + q * 8;
        steps[k] = is_there ? kSegment : 0;
    }
    const Nvfp4::Tables tables(*reinterpret_cast<const volatile unsigned*>(zeros + lane));
    Sum sums(own_factors + wide * 4);
    for (int now = warp; now < segments;) {
#pragma unroll
        for (int i = 0; i < Nvfp4::kAhead; ++i) {
            if (now >= segments) break;
            const Activations x = {{bases[0] + now * steps[0], bases[1] + now * steps[1]},
                                   reinterpret_cast<const float*>(own_factors) + now * (kSegment / 16)};
            sums.add(tables, segment[i], now, x);
            if (next < segments) weights.load(next, segment[i]);
            next += warps;
            now += warps;
        }
    }
    const int matrix = lane >> 4;
    const float y = sums.finish(segments, scales[blockIdx.y * 2 + matrix], row_unit);
    if (warp == 0) out[(static_cast<long long>(blockIdx.y) * 2 + matrix) * groups * 16 + blockIdx.x * 16 + (lane & 15)] = y;
}

#define STRATA_WAY(NAME, LAYOUT, SUM)                                                                                  \
    extern "C" __global__ void __launch_bounds__(320, 2)                                                               \
        NAME(const unsigned char* experts, long long stride, int wide, int groups, const unsigned* codes,              \
             const unsigned* factors, const float* scales, float row_unit, float* out) {                               \
        gate_up<LAYOUT, SUM>(experts, stride, wide, groups, codes, factors, scales, row_unit, out);                    \
    }

STRATA_WAY(beside_in_order, Beside, InOrder)
STRATA_WAY(apart_in_order, Apart, InOrder)
STRATA_WAY(beside_any_order, Beside, AnyOrder)
STRATA_WAY(apart_any_order, Apart, AnyOrder)

// The plainest reading of `count` pieces of 16 bytes: what each thread has read, xored.
extern "C" __global__ void read_all(const uint4* from, long long count, unsigned* out) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned seen = 0;
    for (long long at = thread; at < count; at += step * 4) {
        uint4 pieces[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pieces[i] = at + i * step < count ? strata::device::load_once(from + at + i * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) seen ^= pieces[i].x ^ pieces[i].y ^ pieces[i].z ^ pieces[i].w;
    }
    out[thread] = seen;
}
