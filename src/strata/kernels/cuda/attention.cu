// Attention of a window's rows over a cache (FP32 or BF16), dense or over selected blocks, in two launches.
//
// A row's positions form a list: all of them, or those of its blocks and then of the incomplete tail. The list is cut
// every 64 entries; `attend` gives each cut's maximum, sum and weighted values, `attend_combine` joins them. A cut of
// a list that holds every position has the same positions in the same order as the dense one, so it has the same bits.
// Short cuts give every multiprocessor work at a few hundred positions already; a cut's partial results are then up to
// an eighth of what it reads.
// Bytes: listed positions x 2 x G x D x (4 or 2). Blocks of other query heads read the same keys through the cache.
//
// A row of the cache is read by a group of L = 8, 16 or 32 lanes, eight columns each, so a block of 256 threads has
// 256 / L groups and each of them L / 4 entries of a cut. All of a cut's keys are under way before the first is used,
// and all of its values before the scores are.
//
// Orders: a score is the sum of a lane's eight columns rising, then over its group by a tree; a cut's sum runs over
// the 8 entries of a warp by a tree, then over warps rising; values over a group's entries rising, then over groups
// rising; cuts are dealt to 16 slices in turn, summed rising, then over slices rising.
#include "device.h"
#include "rows.h"

using namespace strata;
using namespace strata::rows;

constexpr int kCut = 64;         // entries of a list
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPerWarp = kCut / kWarps;
constexpr int kHeads = 4;        // query heads of a block, of one key/value head; kCut x kHeads scores: one a thread
constexpr int kSlices = 16;      // of the cuts that are joined
constexpr int kBatch = 8;        // cuts of a slice that are under way at once

static_assert(kCut * kHeads == kThreads && kPerWarp == 8, "a thread holds one score of a cut");

struct Shape {
    const float* q;         // T x N x D
    const void *k, *v;      // P x G x D
    const int* blocks;      // T x M ids, ascending, then -1; null: every position
    float2* sums;           // T x N x cuts: maximum and sum
    float* values;          // T x N x cuts x pitch
    int heads, kv_heads, group, parts;  // query heads of a key/value head, and blocks that share them
    int width, pitch, listed, block;
    int shift;              // block as a power of two, -1 if it is none
    int is_full;            // lists hold as many of the complete blocks as they can
    int positions, cuts;
    float scale;
};

// Entries of a row's list: `of_blocks` of listed blocks, then those at `entry + to_tail`. ids null: every position.
struct List {
    const int* ids;
    int of_blocks, to_tail, entries;
};

// By all threads.
__device__ __forceinline__ List list_of(const Shape& s, int t, int position) {
    const int end = min(position + t, s.positions - 1) + 1;
    if (s.blocks == nullptr) return {nullptr, 0, 0, end};
    const int complete = s.shift >= 0 ? end >> s.shift : end / s.block;
    const int* ids = s.blocks + static_cast<long long>(t) * s.listed;
    int count = min(complete, s.listed);
    if (!s.is_full && count > 0 && ids[count - 1] < 0) {
        const int most = count;
        count = 0;
#pragma unroll 1
        for (int first = 0; first < most; first += blockDim.x) {
            const int i = first + threadIdx.x;
            count += __syncthreads_count(i < most && ids[i] >= 0);
        }
    }
    if (count == complete) return {nullptr, 0, 0, end};
    const int of_blocks = count * s.block, tail = complete * s.block;
    return {ids, of_blocks, tail - of_blocks, of_blocks + end - tail};
}

__device__ __forceinline__ int position_of(const Shape& s, const List& list, int entry) {
    if (list.ids == nullptr) return entry;
    if (entry >= list.of_blocks) return entry + list.to_tail;
    if (s.shift >= 0) return (list.ids[entry >> s.shift] << s.shift) + (entry & (s.block - 1));
    return list.ids[entry / s.block] * s.block + entry % s.block;
}

// Eight columns of a row as they lie in the cache.
template <bool kBf16>
struct Eight;
template <>
struct Eight<true> {
    unsigned words[4];
};
template <>
struct Eight<false> {
    float values[8];
};

__device__ __forceinline__ void load_whole(const void* at, Eight<true>& to) {
    const uint4 raw = *static_cast<const uint4*>(at);
    to.words[0] = raw.x, to.words[1] = raw.y, to.words[2] = raw.z, to.words[3] = raw.w;
}
__device__ __forceinline__ void load_whole(const void* at, Eight<false>& to) {
    const float4 low = static_cast<const float4*>(at)[0], high = static_cast<const float4*>(at)[1];
    to.values[0] = low.x, to.values[1] = low.y, to.values[2] = low.z, to.values[3] = low.w;
    to.values[4] = high.x, to.values[5] = high.y, to.values[6] = high.z, to.values[7] = high.w;
}
__device__ __forceinline__ void put_one(const void* at, int i, Eight<true>& to) {
    to.words[i / 2] |= static_cast<unsigned>(*static_cast<const unsigned short*>(at)) << (i % 2 * 16);
}
__device__ __forceinline__ void put_one(const void* at, int i, Eight<false>& to) {
    to.values[i] = *static_cast<const float*>(at);
}
__device__ __forceinline__ void unpack(const Eight<true>& from, float* to) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[2 * i] = device::bf16_low(from.words[i]), to[2 * i + 1] = device::bf16_high(from.words[i]);
}
__device__ __forceinline__ void unpack(const Eight<false>& from, float* to) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = from.values[i];
}

// Eight columns from element `at`. Not kEights: the width is no multiple of 8, and only `there` of them are in the row;
// the last of those stands in for the others.
template <bool kBf16, bool kEights>
__device__ __forceinline__ Eight<kBf16> load_eight(const void* rows, unsigned at, int there) {
    constexpr int kBytes = kBf16 ? 2 : 4;
    Eight<kBf16> found = {};
    const char* from = static_cast<const char*>(rows) + static_cast<unsigned long long>(at) * kBytes;
    if constexpr (kEights) {
        load_whole(from, found);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) put_one(from + min(i, there - 1) * kBytes, i, found);
    }
    return found;
}

// Sums of 2 kHalf values over the 2 kHalf lanes of a group, to values[0]: lane l of it gets the sum of value l.
template <int kHalf>
__device__ __forceinline__ void group_sums(float* values, int lane) {
    const bool is_upper = (lane & kHalf) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float sent = is_upper ? values[i] : values[i + kHalf];
        const float kept = is_upper ? values[i + kHalf] : values[i];
        values[i] = kept + __shfl_xor_sync(kAll, sent, kHalf);
    }
    if constexpr (kHalf > 1) group_sums<kHalf / 2>(values, lane);
}

// What the threads of a block share while they attend: a weight a thread, as [entry][head].
template <int kLanes>
struct Room {
    float4 values[kThreads / kLanes * kHeads * 2 * kLanes];  // [group][head][half of eight][lane]
    float weights[kThreads], largest[kWarps * kHeads], sums[kWarps * kHeads];
};

// A thread's score (entry threadIdx.x / kHeads, head threadIdx.x % kHeads) to its weight exp(score - maximum) in
// `weights`; the cut's maximum is returned, the warps' sums are left in `sums`.
template <int kLanes>
__device__ __forceinline__ float soften(float score, bool is_there, Room<kLanes>& room) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = lane % kHeads;
    float largest = is_there ? score : lowest();
#pragma unroll
    for (int step = 16; step >= kHeads; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
    if (lane < kHeads) room.largest[warp * kHeads + lane] = largest;
    __syncthreads();
    largest = room.largest[head];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, room.largest[w * kHeads + head]);
    const float weight = is_there ? expf(score - largest) : 0.0f;
    room.weights[threadIdx.x] = weight;
    float sum = weight;
#pragma unroll
    for (int step = 16; step >= kHeads; step >>= 1) sum += __shfl_xor_sync(kAll, sum, step);
    if (lane < kHeads) room.sums[warp * kHeads + lane] = sum;
    __syncwarp();
    return largest;
}

// The values of all groups of lanes, summed over groups, to `to`: heads x cuts x pitch from the cut on.
template <int kLanes>
__device__ __forceinline__ void join_groups(const Room<kLanes>& room, const Shape& s, int heads, float* to) {
#pragma unroll 1
    for (int i = threadIdx.x; i < heads * 2 * kLanes; i += kThreads) {
        float4 total = room.values[i];
#pragma unroll
        for (int group = 1; group < kThreads / kLanes; ++group) {
            const float4 other = room.values[group * kHeads * 2 * kLanes + i];
            total.x += other.x, total.y += other.y, total.z += other.z, total.w += other.w;
        }
        const int head = i / (2 * kLanes), half = i / kLanes % 2, column = i % kLanes * 8 + half * 4;
        *reinterpret_cast<float4*>(to + static_cast<long long>(head) * s.cuts * s.pitch + column) = total;
    }
}

template <bool kBf16, int kLanes, bool kEights>
__device__ __forceinline__ void attend_rows(const Inputs& inputs, const Shape& s) {
    constexpr int kOwn = kLanes / kHeads;  // entries of a group
    using Shared = Room<kLanes>;
    __shared__ Shared room;
    device::let_next_start();
    const int t = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = blockIdx.y / s.parts, head = g * s.group + (blockIdx.y - g * s.parts) * kHeads;
    const int heads = min(kHeads, (g + 1) * s.group - head), row = t * s.heads + head;
    const int sub = lane % kLanes, there = s.width - sub * 8;
    const unsigned column = there > 0 ? sub * 8 : 0;  // lanes past the width look on
    device::wait_for_previous();
    const List list = list_of(s, t, *inputs.position);
#pragma unroll 1
    for (int cut = blockIdx.z; cut * kCut < list.entries; cut += gridDim.z) {
        const int mine = cut * kCut + warp * kPerWarp + lane % kPerWarp, here = min(kCut, list.entries - cut * kCut);
        const int position = position_of(s, list, min(mine, list.entries - 1));  // past the list its last, of no weight
        Eight<false> q[kHeads];  // again for every cut, from the first-level cache: registers are short
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const unsigned from = (row + min(h, heads - 1)) * s.width + column;
            q[h] = load_eight<false, kEights>(s.q, from, there > 0 ? there : s.width);
        }
        unsigned at[kOwn];
        Eight<kBf16> keys[kOwn], values[kOwn];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int own = __shfl_sync(kAll, position, lane / kLanes * kOwn + i);
            at[i] = static_cast<unsigned>(own * s.kv_heads + g) * s.width + column;
            keys[i] = load_eight<kBf16, kEights>(s.k, at[i], there > 0 ? there : s.width);
        }
        float scores[kLanes];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            float key[8];
            unpack(keys[i], key);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                float score = 0.0f;
#pragma unroll
                for (int d = 0; d < 8; ++d)
                    if (kEights || d < there) score = fused(q[h].values[d], key[d], score);
                scores[i * kHeads + h] = there > 0 ? score : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            values[i] = load_eight<kBf16, kEights>(s.v, at[i], there > 0 ? there : s.width);
        group_sums<kLanes / 2>(scores, lane);
        const float largest = soften(scores[0] * s.scale, threadIdx.x / kHeads < here, room);
        float sums[kHeads][8] = {};
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int entry = threadIdx.x / kLanes * kOwn + i;
            if (entry >= here) continue;
            const float4 weight = reinterpret_cast<const float4*>(room.weights)[entry];
            float value[8];
            unpack(values[i], value);
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                sums[0][d] = fused(weight.x, value[d], sums[0][d]), sums[1][d] = fused(weight.y, value[d], sums[1][d]);
                sums[2][d] = fused(weight.z, value[d], sums[2][d]), sums[3][d] = fused(weight.w, value[d], sums[3][d]);
            }
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                room.values[((threadIdx.x / kLanes * kHeads + h) * 2 + half) * kLanes + sub] = make_float4(
                    sums[h][half * 4], sums[h][half * 4 + 1], sums[h][half * 4 + 2], sums[h][half * 4 + 3]);
        __syncthreads();
        join_groups(room, s, heads, s.values + (static_cast<long long>(row) * s.cuts + cut) * s.pitch);
        if (threadIdx.x < heads) {
            float total = room.sums[threadIdx.x];
            for (int w = 1; w < kWarps; ++w) total += room.sums[w * kHeads + threadIdx.x];
            s.sums[static_cast<long long>(row + threadIdx.x) * s.cuts + cut] = make_float2(largest, total);
        }
    }
}

// Grid (T, groups of heads, cuts in turn), 256 threads. L covers the width: columns past it are zeros. `any` reads
// widths that are no multiple of 8.
#define ATTEND(name, is_bf16, lanes, eights)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, is_bf16 ? 2 : 1) name(Inputs inputs, const Shape s) { \
        attend_rows<is_bf16, lanes, eights>(inputs, s);                                                      \
    }
ATTEND(attend_f32_8, false, 8, true)
ATTEND(attend_f32_16, false, 16, true)
ATTEND(attend_f32_32, false, 32, true)
ATTEND(attend_f32_any, false, 32, false)
ATTEND(attend_bf16_8, true, 8, true)
ATTEND(attend_bf16_16, true, 16, true)
ATTEND(attend_bf16_32, true, 32, true)
ATTEND(attend_bf16_any, true, 32, false)

// A gate of the output: column d of head n of row t lies at t * row + n * head + d. Null: none.
struct Gate {
    const float* x;
    int head, row;
};

// Grid (N, pitch / 64, T), 256 threads: 64 columns of out[t, n], times sigmoid(gate), from the cuts of its list, a slice
// of them 16 threads.
extern "C" __global__ void __launch_bounds__(256) attend_combine(Inputs inputs, const Shape s, const Gate gate, float* out,
                                                                 const device::Ahead ahead) {
    __shared__ float4 totals[kThreads];
    __shared__ float shares[kSlices], warps[kWarps];
    device::let_next_start();
    device::bring(ahead);
    device::wait_for_previous();
    const int t = blockIdx.z, slice = threadIdx.x / 16, column = blockIdx.y * 64 + threadIdx.x % 16 * 4;
    const long long row = static_cast<long long>(t) * s.heads + blockIdx.x;
    const float2* sums = s.sums + row * s.cuts;
    const float* values = s.values + row * s.cuts * s.pitch + column;
    const int cuts = (list_of(s, t, *inputs.position).entries + kCut - 1) / kCut;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float largest = lowest(), share = 0.0f, let_through = 0.0f;
    const int own = blockIdx.y * 64 + threadIdx.x;  // the column that this thread writes
    if (gate.x != nullptr && threadIdx.x < 64 && own < s.width)
        let_through = gate.x[static_cast<long long>(t) * gate.row + blockIdx.x * gate.head + own];
    for (int first = slice; first < cuts || first == slice; first += kSlices * kBatch) {
        float4 value[kBatch];
        float2 sum[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int cut = min(first + i * kSlices, cuts - 1);
            sum[i] = sums[cut];
            value[i] = *reinterpret_cast<const float4*>(values + static_cast<long long>(cut) * s.pitch);
        }
        if (first == slice) {  // every thread comes here once, its first values under way
            for (int cut = threadIdx.x; cut < cuts; cut += kThreads) largest = fmaxf(largest, sums[cut].x);
            for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
            if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
            __syncthreads();
            for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warps[w]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * kSlices >= cuts) continue;
            const float part = expf(sum[i].x - largest);
            share = fused(part, sum[i].y, share);
            total.x = fused(part, value[i].x, total.x), total.y = fused(part, value[i].y, total.y);
            total.z = fused(part, value[i].z, total.z), total.w = fused(part, value[i].w, total.w);
        }
    }
    totals[threadIdx.x] = total;
    if (threadIdx.x % 16 == 0) shares[slice] = share;
    __syncthreads();
    if (threadIdx.x >= 64 || own >= s.width) return;
    const float* parts = reinterpret_cast<const float*>(totals) + threadIdx.x;
    float sum = parts[0], all = shares[0];
    for (int i = 1; i < kSlices; ++i) sum += parts[i * 64], all += shares[i];
    const float value = sum / all;
    out[row * s.width + own] = gate.x == nullptr ? value : sigmoid(let_through) * value;
}
