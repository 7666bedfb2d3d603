// A layer's picks between the GPU and the CPU: routed, split into what lies in slots, what the GPU reads over the link and
// what the CPU computes, and the CPU's part posted to its mailbox.
//
// Nothing here is timed or chosen by load: who computes an expert is a function of the tables and the picks.
#pragma once
#include "exact.h"
#include "mailbox.h"
#include "device.h"
#include "router.h"

namespace strata {
namespace round {

using namespace strata::exact;

constexpr int kMostPicks = 256, kMostExperts = 512;

// Of a round, in device memory.
struct RoundState {
    unsigned base;     // number of the first exchange
    unsigned aborted;  // kAborted..., sticky until the next round
    int aborted_layer;
    unsigned told;   // number of the exchange whose answer is there
    unsigned asked;  // number of the exchange that a block waits for
    unsigned unused;
    unsigned long long deadline;
    unsigned long long hits, aliases, others;
};

struct Task {  // as in expert.cu
    unsigned long long blob;
    float scales[3];
    int first, count, row;
};

struct PostShape {
    int hidden, padded, rows, top_k, layer, exchange, num_experts, balance;
    float fraction;  // of the misses that the GPU reads over the link
};

// Where the parts of a post lie. `where` [L*E]: the address of an expert in a slot, or 0. `alias` [L*E]: the device's
// address of its page-locked copy, or 0. `counts` [L*E]: rows that picked it are added.
struct PostTables {
    const unsigned long long *where, *alias;
    const float* scales;
    unsigned* counts;
};

// The GPU's own list, in device memory. `num_tasks` [4]: its tasks, those of them in slots, the CPU's tasks and picks.
// `by_cpu` [picks]: 1 where the CPU computes a pick.
struct PostList {
    Task* tasks;
    int *rows, *slots, *num_tasks;
    unsigned char* by_cpu;
};

struct PostMail {
    StrataMailbox* box;
    float* x;
    StrataMailTask* tasks;
    int *rows, *slots;
};

constexpr int kQuantisers = 8;  // blocks of a row: expert_step.py

enum Class : int { kAlias = 0, kHit = 1, kCpu = 2 };

// Codes and scale of 16 values held by 16 neighbouring lanes, as expert.cu's.
__device__ __forceinline__ bool quantise_lanes(float x, signed char* code, float* scale) {
    unsigned largest = magnitude(x);
    for (int step = 8; step > 0; step >>= 1) {
        const unsigned other = __shfl_xor_sync(0xFFFFFFFFu, largest, step);
        largest = other > largest ? other : largest;
    }
    const GroupScale group = group_scale(largest);
    *code = static_cast<signed char>(group.scale != 0.0f ? nearest(product(x, group.inverse)) : 0);
    *scale = group.scale;
    return group.finite;
}

// Part `part` of kQuantisers of a row.
__device__ void quantise_row(const PostShape& shape, int row, int part, const float* x, signed char* codes, float* scales,
                             unsigned char* flags) {
    const long long at = static_cast<long long>(row) * shape.padded;
    // blockDim divides by 32, padded by 64
    for (int i = part * blockDim.x + threadIdx.x; i < shape.padded; i += kQuantisers * blockDim.x) {
        const float value = i < shape.hidden ? x[static_cast<long long>(row) * shape.hidden + i] : 0.0f;
        if (!quantise_lanes(value, codes + at + i, scales + (at + i) / 16)) flags[row] = 1;
    }
}

// Puts one pick, and its expert's task if it is the first of it, into the list it belongs to.
__device__ void list_pick(const PostShape& shape, const PostTables& tables, const PostList& list, const PostMail& mail,
                          int p, int picks, const int* expert_of, const int* class_of, const int* leads, int* totals) {
    const int expert = expert_of[p], chosen = class_of[p];
    const bool cpu = chosen == kCpu;
    const long long base = static_cast<long long>(shape.layer) * shape.num_experts;
    int before = 0, same_before = 0, same = 0, task = 0;
    for (int q = 0; q < picks; ++q) {
        const bool theirs = class_of[q] == kCpu;
        if (theirs != cpu) continue;
        const bool earlier = class_of[q] < chosen || (class_of[q] == chosen && expert_of[q] < expert);
        before += earlier;
        task += earlier && leads[q];
        same += expert_of[q] == expert;
        same_before += expert_of[q] == expert && q < p;
    }
    list.by_cpu[p] = cpu;
    int* rows = cpu ? mail.rows : list.rows;
    int* slots = cpu ? mail.slots : list.slots;
    rows[before + same_before] = p / shape.top_k;
    slots[before + same_before] = p;
    const long long flat = base + expert;
    atomicAdd(tables.counts + flat, 1u);
    if (cpu) atomicAdd(totals + 3, 1);
    if (leads[p]) {
        atomicAdd(totals + chosen, 1);
        if (cpu) {
            mail.tasks[task] = {expert, before, same};
        } else {
            Task made;
            made.blob = chosen == kHit ? tables.where[flat] : tables.alias[flat];
            for (int i = 0; i < 3; ++i) made.scales[i] = tables.scales[3 * flat + i];
            made.first = before;
            made.count = same;
            made.row = p / shape.top_k;
            list.tasks[task] = made;
        }
    }
}

// How many of the page-locked misses the GPU takes, of `pinned` such experts and `others`: experts/policy.py,
// `split_pinned`.
__device__ __forceinline__ int taken_of(const PostShape& shape, int pinned, int others) {
    const int shared = shape.balance ? pinned + others : pinned;
    return static_cast<int>(static_cast<double>(shared + 1) * static_cast<double>(shape.fraction));
}

// Sorts the picks into the three lists. By one block, a thread a pick.
__device__ void split_picks(const PostShape& shape, const PostTables& tables, const PostList& list, const PostMail& mail,
                            const int* expert_of, int* class_of, int* leads, int* totals) {
    const int picks = shape.rows * shape.top_k, p = threadIdx.x;
    if (p < picks) {
        int leader = 1;
        for (int q = 0; q < p; ++q) leader &= expert_of[q] != expert_of[p];
        leads[p] = leader;
    }
    __syncthreads();
    // Of the page-locked misses the GPU takes the first ones by number, as many as the share says.
    int chosen = kHit;
    if (p < picks) {
        int pinned = 0, others = 0, rank = 0;
        for (int q = 0; q < picks; ++q) {
            if (!leads[q]) continue;
            pinned += class_of[q] == kAlias;
            others += class_of[q] == kCpu;
            rank += class_of[q] == kAlias && expert_of[q] < expert_of[p];
        }
        const int taken = taken_of(shape, pinned, others);
        chosen = class_of[p] == kAlias && rank >= taken ? kCpu : class_of[p];
    }
    __syncthreads();
    if (p < picks) class_of[p] = chosen;
    __syncthreads();
    if (p < picks) list_pick(shape, tables, list, mail, p, picks, expert_of, class_of, leads, totals);
    __syncthreads();
    if (p == 0) {
        list.num_tasks[0] = totals[kAlias] + totals[kHit];
        list.num_tasks[1] = totals[kHit];
        list.num_tasks[2] = totals[kCpu];
        list.num_tasks[3] = totals[3];
    }
}

// Logits of the router, T x E: null where `ids` hold the picks already.
struct Router {
    const float* logits;
    int* ids;
    float* weights;
    int renormalise, unused;
};

// Experts served since the start. Added in memory: nobody waits for what was there.
__device__ __forceinline__ void count(RoundState* state, int hits, int aliases, int others) {
    atomicAdd(&state->hits, static_cast<unsigned long long>(hits));
    atomicAdd(&state->aliases, static_cast<unsigned long long>(aliases));
    atomicAdd(&state->others, static_cast<unsigned long long>(others));
}

// A layer's part of the tables, which nothing writes during a round: read before the launch waits.
struct LayerTables {
    unsigned long long where[kMostExperts], alias[kMostExperts];
    float scales[kMostExperts][3];
};

// Returns whether one of the experts that the thread read has no slot.
__device__ __forceinline__ bool read_tables(const PostShape& shape, const PostTables& tables, LayerTables& layer) {
    const long long first = static_cast<long long>(shape.layer) * shape.num_experts;
    bool some = false;
    for (int e = threadIdx.x; e < shape.num_experts; e += blockDim.x) {
        some |= (layer.where[e] = tables.where[first + e]) == 0;
        layer.alias[e] = tables.alias[first + e];
        for (int i = 0; i < 3; ++i) layer.scales[e][i] = tables.scales[3 * (first + e) + i];
    }
    return some;
}

// A part of x on its way to the host's memory. Made early, so that the first pieces are under way while the picks are found;
// nobody waits here until what was sent is there. By all threads from `first` on.
struct Parcel {
    static constexpr int kHeld = 3;
    float4 held[kHeld];
    int begin, step, pieces, rest;

    __device__ __forceinline__ Parcel(const float* x, int count, int first)
        : begin(static_cast<int>(threadIdx.x) - first), step(static_cast<int>(blockDim.x) - first), pieces(count / 4),
          rest(count) {
        if (begin < 0) begin = rest;
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (begin + i * step < pieces) held[i] = reinterpret_cast<const float4*>(x)[begin + i * step];
    }

    __device__ __forceinline__ void send(const float* x, float* to) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (begin + i * step < pieces) reinterpret_cast<float4*>(to)[begin + i * step] = held[i];
        for (int at = begin + kHeld * step; at < pieces; at += step)
            reinterpret_cast<float4*>(to)[at] = reinterpret_cast<const float4*>(x)[at];
        for (int i = pieces * 4 + begin; i < rest; i += step) to[i] = x[i];
    }
};

__device__ __forceinline__ int class_of_pick(const PostShape& shape, const PostTables& tables, long long flat) {
    const unsigned long long where = tables.where[flat], alias = tables.alias[flat];  // both under way at once
    return where != 0 ? kHit : alias != 0 && shape.fraction > 0.0f ? kAlias : kCpu;
}

// Sorts the picks of one row, which are experts of their own, by warp 0: lane p has pick p. What split_picks does, without
// a barrier. Returns the CPU's tasks.
__device__ int split_row(const PostShape& shape, const PostTables& tables, const PostList& list, const PostMail& mail,
                         const LayerTables& layer, int expert, RoundState* state) {
    const int p = threadIdx.x & 31, picks = shape.top_k;
    const bool is_pick = p < picks;
    const long long flat = static_cast<long long>(shape.layer) * shape.num_experts + (is_pick ? expert : 0);
    const int known = is_pick ? expert : 0;
    const unsigned long long where = layer.where[known], alias = layer.alias[known];
    const float* scales = layer.scales[known];
    int chosen = !is_pick ? -1 : where != 0 ? kHit : alias != 0 && shape.fraction > 0.0f ? kAlias : kCpu;
    const unsigned all = strata::rows::kAll, pinned = __ballot_sync(all, chosen == kAlias);
    if (pinned != 0) {
        int rank = 0;
#pragma unroll 5
        for (int q = 0; q < picks; ++q) {
            const int other = __shfl_sync(all, expert, q);
            rank += (pinned >> q & 1u) != 0 && other < expert;
        }
        const int taken = taken_of(shape, __popc(pinned), __popc(__ballot_sync(all, chosen == kCpu)));
        if (chosen == kAlias && rank >= taken) chosen = kCpu;
    }
    const unsigned aliases = __ballot_sync(all, chosen == kAlias), cpus = __ballot_sync(all, chosen == kCpu);
    const unsigned hits = __ballot_sync(all, chosen == kHit), same = chosen == kAlias ? aliases : chosen == kHit ? hits : cpus;
    int before = chosen == kHit ? __popc(aliases) : 0;  // of its own list
#pragma unroll 5
    for (int q = 0; q < picks; ++q) {
        const int other = __shfl_sync(all, expert, q);
        before += (same >> q & 1u) != 0 && other < expert;
    }
    if (is_pick) {
        const bool cpu = chosen == kCpu;
        list.by_cpu[p] = cpu;
        (cpu ? mail.rows : list.rows)[before] = 0;
        (cpu ? mail.slots : list.slots)[before] = p;
        atomicAdd(tables.counts + flat, 1u);
        if (cpu)
            mail.tasks[before] = {expert, before, 1};
        else
            list.tasks[before] = {chosen == kHit ? where : alias, {scales[0], scales[1], scales[2]}, before, 1, 0};
    }
    const int num_hits = __popc(hits), num_aliases = __popc(aliases), num_cpu = __popc(cpus);
    if (p == 0) {
        list.num_tasks[0] = num_aliases + num_hits;
        list.num_tasks[1] = num_hits;
        list.num_tasks[2] = num_cpu;
        list.num_tasks[3] = num_cpu;
        count(state, num_hits, num_aliases, num_cpu);
    }
    return num_cpu;
}

// Of several rows: a warp routes each, all threads sort the picks. Sets the CPU's tasks and picks.
__device__ void split_rows(const PostShape& shape, const PostTables& tables, const PostList& list, const PostMail& mail,
                           const Router& router, RoundState* state, int* cpu) {
    __shared__ int expert_of[kMostPicks], class_of[kMostPicks], leads[kMostPicks];
    __shared__ float weights[kMostPicks];
    __shared__ int totals[4];  // alias tasks, hit tasks, CPU tasks, CPU picks
    const int picks = shape.rows * shape.top_k, p = threadIdx.x, warp = threadIdx.x >> 5;
    if (p < 4) totals[p] = 0;
    if (router.logits != nullptr && warp < shape.rows)
        strata::rows::route_row<512>(router.logits + static_cast<long long>(warp) * shape.num_experts,
                                     shape.num_experts, shape.top_k, router.renormalise != 0,
                                     expert_of + warp * shape.top_k, weights + warp * shape.top_k);
    __syncthreads();
    if (p < picks) {
        if (router.logits == nullptr) {
            expert_of[p] = router.ids[p];
        } else {
            router.ids[p] = expert_of[p];
            router.weights[p] = weights[p];
        }
        class_of[p] = class_of_pick(shape, tables, static_cast<long long>(shape.layer) * shape.num_experts + expert_of[p]);
    }
    __syncthreads();
    split_picks(shape, tables, list, mail, expert_of, class_of, leads, totals);
    if (p != 0) return;
    cpu[0] = totals[kCpu], cpu[1] = totals[3];
    count(state, totals[kHit], totals[kAlias], totals[kCpu]);
}

// Routes the rows, splits the picks, and posts the CPU's part if there is one. By one block. `kMayBeOne`: there may be one
// row; no code for a single one is compiled else.
template <bool kMayBeOne>
__device__ void post(const PostShape& shape, const PostTables& tables, const PostList& list, const PostMail& mail,
                     const Router& router, const float* x, RoundState* state) {
    __shared__ strata::rows::ChunkPicks room;
    __shared__ LayerTables layer;
    __shared__ int cpu[2];  // tasks, picks
    const int p = threadIdx.x;
    const bool is_one = kMayBeOne && shape.rows == 1 && shape.top_k <= strata::rows::kBlockPicks &&
                        shape.num_experts <= kMostExperts;
    const bool may_miss = __syncthreads_or(is_one && read_tables(shape, tables, layer)) != 0;
    device::wait_for_previous();
    const unsigned aborted = *static_cast<const volatile unsigned*>(&state->aborted);  // under way; used late
    const int count = shape.rows * shape.hidden;
    if (is_one) {
        int expert = 0;
        const Parcel parcel(x, may_miss ? count : 0, 32);  // the first warp splits the picks meanwhile
        if (router.logits != nullptr) {
            float weight = 0.0f;
            strata::rows::route_by_block(router.logits, shape.num_experts, shape.top_k, router.renormalise != 0, room,
                                         &expert, &weight);
            if (p < shape.top_k) router.ids[p] = expert, router.weights[p] = weight;
        } else if (p < shape.top_k) {
            expert = router.ids[p];
        }
        if (router.logits == nullptr) __syncthreads();  // the tables are there
        if (p < 32) {
            const int tasks = split_row(shape, tables, list, mail, layer, expert, state);
            if (p == 0) cpu[0] = cpu[1] = tasks;
        } else if (aborted == 0) {  // of a round that was given up the CPU may still read what it was given last
            parcel.send(x, mail.x);
        }
    } else {
        split_rows(shape, tables, list, mail, router, state, cpu);
        __syncthreads();
        if (cpu[0] != 0 && aborted == 0) Parcel(x, count, 0).send(x, mail.x);
    }
    __syncthreads();
    if (p != 0 || cpu[0] == 0 || aborted != 0) return;
    mail.box->layer = shape.layer;
    mail.box->num_tasks = cpu[0];
    mail.box->num_picks = cpu[1];
    mail.box->num_rows = shape.rows;
    // Releases what all threads wrote before the barrier.
    device::store_release(&mail.box->posted, state->base + static_cast<unsigned>(shape.exchange) + 1u);
}

}  // namespace round
}  // namespace strata
