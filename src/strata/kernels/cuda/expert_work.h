// How a block shares the products of experts among its warps. A unit of work is one segment (128 weights) of a pair of
// groups: 32 rows that share activations, gate and up of the same columns, or neighbouring groups of down. The warps
// take the units in turn and keep the weights of some of them under way, those of the first before the activations are
// there. Sums of units lie in shared memory and are added in the order of segments. Up to 4 rows of activations share
// one reading of the weights.
#pragma once
#include "expert.h"

namespace strata {
namespace experts {

constexpr int kRows = 4;
constexpr int kZeros = 256;  // bytes of zeros before the codes

// Number of the warp. By a shuffle, so that the compiler knows that all lanes have the same and branch alike.
__device__ __forceinline__ int warp_number() { return __shfl_sync(kAll, static_cast<int>(threadIdx.x >> 5), 0); }

// Pairs of groups of one matrix, or of gate and up, that a block multiplies.
struct Work {
    const unsigned char* weights;  // the first group
    int superblocks, blocks;       // of a row: of 64 weights, and of 16 without those of padding
    int pairs, groups;
    int warp, warps;  // this one's number, and how many share the work
    __device__ __forceinline__ int segments() const { return (superblocks + 1) / 2; }
};

// Which unit a warp is at.
struct Place {
    int pair, segment;
    __device__ __forceinline__ Place(const Work& work) : pair(0), segment(work.warp) { settle(work); }
    // Both return how many pairs further the next unit is.
    __device__ __forceinline__ int advance(const Work& work) {
        segment += work.warps;
        return settle(work);
    }
    __device__ __forceinline__ int settle(const Work& work) {
        const int before = pair;
        for (; segment >= work.segments(); segment -= work.segments()) ++pair;
        return pair - before;
    }
};

// The room of a block: zeros, codes and scales of kRows rows of activations (a row of each begins in other banks than
// the row before), sums of units [unit][R][32]. experts.py: `_shared`.
struct Room {
    signed char* codes;
    float *scales, *sums;
    int pitch;  // 64-byte pieces of a row of codes, 16-byte pieces of a row of scales
    __device__ __forceinline__ Room(uint4* start, int superblocks) : pitch(superblocks | 1) {
        codes = reinterpret_cast<signed char*>(start) + kZeros;
        scales = reinterpret_cast<float*>(codes + kRows * pitch * 64);
        sums = scales + kRows * pitch * 4;
    }
    // 32 bytes past the banks of a row's start, so that lanes with zeros do not disturb the others.
    __device__ __forceinline__ const signed char* zeros() const { return codes - kZeros + 32; }
};

// The weights of a warp's units: `begin` asks for the first Format::kAhead of them, `fetch` for one more.
template <class Format>
struct Pipe {
    typename Format::Segment segments[Format::kAhead];
    Place next;
    const unsigned char* from;  // of `next`, in the lane's group

    __device__ __forceinline__ explicit Pipe(const Work& work) : next(work) {}

    __device__ __forceinline__ void begin(const Work& work) {
        next = Place(work);
        const int group = next.pair * 2 + static_cast<int>(threadIdx.x >> 4 & 1);
        from = work.weights + (static_cast<long long>(group) * work.superblocks + next.segment * 2) * Format::kBytes;
#pragma unroll
        for (int i = 0; i < Format::kAhead; ++i) fetch(work, segments[i]);
    }

    __device__ __forceinline__ void fetch(const Work& work, typename Format::Segment& to) {
        if (next.pair >= work.pairs) return;
        // Where a pair has one group, the lanes of the other read it too.
        const bool is_alone = next.pair * 2 + 1 >= work.groups && (threadIdx.x & 16) != 0;
        Format::load(is_alone ? from - work.superblocks * Format::kBytes : from,
                     work.blocks - next.segment * (kSegment / 16), to);
        const int pairs = next.advance(work);
        from += work.warps * 2 * Format::kBytes;
        if (pairs != 0) from += pairs * 2 * (work.superblocks - work.segments()) * Format::kBytes;
    }
};

// One row of activations into the room: codes and scales, two pieces of 16 bytes a thread under way.
__device__ __forceinline__ void stage(const Room& room, int superblocks, int r, const signed char* codes,
                                      const float* scales) {
    const uint4 *from = reinterpret_cast<const uint4*>(codes), *from_scales = reinterpret_cast<const uint4*>(scales);
    uint4 *to = reinterpret_cast<uint4*>(room.codes) + r * room.pitch * 4;
    uint4 *to_scales = reinterpret_cast<uint4*>(room.scales) + r * room.pitch;
    const int split = superblocks * 4, total = superblocks * 5, step = blockDim.x;
    for (int at = threadIdx.x; at < total; at += step * 2) {
        const int second = at + step;
        const uint4 one = at < split ? from[at] : from_scales[at - split];
        uint4 other = make_uint4(0, 0, 0, 0);
        if (second < total) other = second < split ? from[second] : from_scales[second - split];
        *(at < split ? to + at : to_scales + (at - split)) = one;
        if (second < total) *(second < split ? to + second : to_scales + (second - split)) = other;
    }
}

__device__ __forceinline__ void stage_zeros(uint4* room) {
    if (threadIdx.x < kZeros / 16) room[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// All units of the block for `rows` rows of activations, R or, with R = 4, one less. Ends with their sums in the room.
template <class Format, int R>
__device__ __forceinline__ void multiply(const Work& work, Pipe<Format>& pipe, const Room& room, int rows) {
    const int lane = threadIdx.x & 31, q = lane & 3;
    // Of the activations, as the operand whose columns are lane / 4: see expert.h.
    const int column = lane >> 3;
    const bool has_block = (lane >> 2 & 1) == q >> 1;
    const int row = R == 1 ? 0 : R == 2 ? column & 1 : column;
    const signed char *bases[2];
    int steps[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const bool is_there = has_block && (R == 4 ? row < rows : column >> 1 == k);
        bases[k] = (is_there ? room.codes + row * room.pitch * 64 : room.zeros()) + q * 8;
        steps[k] = is_there ? kSegment : 0;
    }
    const int own = R == 1 ? 0 : R == 2 ? q & 1 : q;  // row of activations of the lane's sums
    float* sums = room.sums + own * 32 + (lane & ~3) + first_row<R>(q);
    const typename Format::Tables tables(*reinterpret_cast<const volatile unsigned*>(room.zeros() + lane * 4));
    Place now(work);
    for (int unit = work.warp; now.pair < work.pairs;) {
#pragma unroll
        for (int i = 0; i < Format::kAhead; ++i) {
            if (now.pair >= work.pairs) break;
            Activations x;
            x.codes[0] = bases[0] + now.segment * steps[0];
            x.codes[1] = bases[1] + now.segment * steps[1];
            x.scales = room.scales + own * room.pitch * 4 + now.segment * (kSegment / 16);
            float acc[R];
#pragma unroll
            for (int r = 0; r < R; ++r) acc[r] = 0.0f;
            add_blocks<Format, R>(tables, pipe.segments[i], now.segment * 2 + 2 <= work.superblocks, x, acc);
            pipe.fetch(work, pipe.segments[i]);
#pragma unroll
            for (int r = 0; r < R; ++r) sums[unit * R * 32 + r] = acc[r];
            unit += work.warps;
            now.advance(work);
        }
    }
    __syncthreads();
}

// The products of a pair's 32 rows with row r of the activations, a lane a row.
template <int R>
__device__ __forceinline__ float total_of(const float* sums, int segments, int pair, int r) {
    const float* own = sums + (pair * segments * R + r) * 32 + (threadIdx.x & 31);
    float total = 0.0f;
#pragma unroll 4
    for (int segment = 0; segment < segments; ++segment) total = sum(total, own[segment * R * 32]);
    return total;
}

}  // namespace experts
}  // namespace strata
