// What a decode round is beside its layers: its start, the split of a layer's picks between the GPU and the CPU, the
// exchange with the CPU's workers, the sum over experts, its end. Compiled at run time by NVRTC, without contraction.
//
// Nothing here is timed or chosen by load: who computes an expert is a function of the tables and the picks, and both
// sides give the same bits. A round that is given up runs to its end without waiting for anybody: sums take zeros for
// what the CPU did not give, and the host repeats the round or ends the request.
#include "exact.h"
#include "mailbox.h"
#include "device.h"

using namespace strata::exact;
namespace device = strata::device;

constexpr int kMostPicks = 256;

// Of a round, in device memory.
struct RoundState {
    unsigned base;     // number of the first exchange
    unsigned aborted;  // kAborted..., sticky until the next round
    int aborted_layer;
    unsigned arrived;  // blocks of a post that are complete
    unsigned long long deadline;
    unsigned long long hits, aliases, others;
};

// Copies the inputs that the host wrote (ticket, limit in microseconds, then the round's `count` words) and resets what
// belongs to a round. One block.
extern "C" __global__ void begin(const int* host, int* inputs, int count, RoundState* state, int exchanges,
                                 unsigned char* flags, int rows) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) inputs[i] = host[2 + i];
    for (int i = threadIdx.x; i < rows; i += blockDim.x) flags[i] = 0;
    if (threadIdx.x == 0) {
        state->base = static_cast<unsigned>(host[0]) * static_cast<unsigned>(exchanges + 1);
        state->aborted = 0;
        state->aborted_layer = -1;
        state->arrived = 0;
        state->deadline =
            device::nanoseconds() + static_cast<unsigned long long>(static_cast<unsigned>(host[1])) * 1000ull;
    }
}

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

__device__ void quantise_row(const PostShape& shape, const float* x, signed char* codes, float* scales,
                             unsigned char* flags, float* mail_x, bool mailed) {
    const long long row = blockIdx.x;
    for (int i = threadIdx.x; i < shape.padded; i += blockDim.x) {  // blockDim divides by 32, padded by 64
        const bool inside = i < shape.hidden;
        const float value = inside ? x[row * shape.hidden + i] : 0.0f;
        if (!quantise_lanes(value, codes + row * shape.padded + i, scales + (row * shape.padded + i) / 16))
            flags[row] = 1;
        if (mailed && inside) mail_x[row * shape.hidden + i] = value;
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

// Sorts the picks into the three lists. One block, a thread a pick.
__device__ void split_picks(const PostShape& shape, const PostTables& tables, const int* ids, const PostList& list,
                            const PostMail& mail, const int* kinds) {
    __shared__ int expert_of[kMostPicks], class_of[kMostPicks], leads[kMostPicks];
    __shared__ int totals[4];  // alias tasks, hit tasks, CPU tasks, CPU picks
    const int picks = shape.rows * shape.top_k, p = threadIdx.x;
    if (p < 4) totals[p] = 0;
    if (p < picks) {
        expert_of[p] = ids[p];
        class_of[p] = kinds[p];
    }
    __syncthreads();
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
        const int shared = shape.balance ? pinned + others : pinned;
        const int taken = static_cast<int>(static_cast<double>(shared) * static_cast<double>(shape.fraction) + 0.5);
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

// Quantises the rows, splits the picks, and posts the CPU's part if there is one. Grid (rows + 1), up to 1,024 threads,
// at least as many as there are picks.
extern "C" __global__ void __launch_bounds__(1024) post(PostShape shape, PostTables tables, PostList list, PostMail mail, RoundState* state,
                                const float* x, const int* ids, signed char* codes, float* scales,
                                unsigned char* flags) {
    __shared__ int kinds[kMostPicks];
    __shared__ int some_cpu, last;
    const int picks = shape.rows * shape.top_k;
    const long long base = static_cast<long long>(shape.layer) * shape.num_experts;
    if (threadIdx.x == 0) some_cpu = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < picks; p += blockDim.x) {
        const long long flat = base + ids[p];
        const int kind = tables.where[flat] != 0 ? kHit : tables.alias[flat] != 0 && shape.fraction > 0.0f ? kAlias : kCpu;
        kinds[p] = kind;
        if (kind != kHit) some_cpu = 1;
    }
    __syncthreads();
    if (blockIdx.x < shape.rows) {
        quantise_row(shape, x, codes, scales, flags, mail.x, some_cpu != 0);
    } else {
        split_picks(shape, tables, ids, list, mail, kinds);
    }
    // The block that arrives last posts: then all that the others wrote is there.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&state->arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    __threadfence_system();
    state->arrived = 0;
    const volatile int* totals = list.num_tasks;
    const int own = totals[0], hits = totals[1], tasks = totals[2], mailed = totals[3];
    state->hits += static_cast<unsigned long long>(hits);
    state->aliases += static_cast<unsigned long long>(own - hits);
    state->others += static_cast<unsigned long long>(tasks);
    if (tasks == 0 || state->aborted != 0) return;
    mail.box->layer = shape.layer;
    mail.box->num_tasks = tasks;
    mail.box->num_picks = mailed;
    mail.box->num_rows = shape.rows;
    __threadfence_system();
    device::store_release(&mail.box->posted, state->base + static_cast<unsigned>(shape.exchange) + 1u);
}

struct CombineShape {
    int hidden, top_k, layer, exchange;
};

// Waits for the CPU's part of the layer; thread 0 of a block. Returns false when the round is given up.
__device__ bool await_answer(const CombineShape& shape, StrataMailbox* box, RoundState* state) {
    const unsigned wanted = state->base + static_cast<unsigned>(shape.exchange) + 1u;
    volatile unsigned* aborted = &state->aborted;
    for (;;) {
        if (device::load_acquire(&box->done) == wanted) return true;
        if (*aborted != 0) return false;
        const bool stopped = device::load_acquire(&box->abort) != 0;
        if (stopped || device::nanoseconds() > state->deadline) {
            *aborted = stopped ? kAbortedByHost : kAbortedByDeadline;
            state->aborted_layer = shape.layer;
            return false;
        }
        device::pause();
    }
}

// y[row] = sum over k, in order, by fused multiply-add from zero, of weights[row, k] * part[row, k]; a part is the GPU's
// own or lies in the mailbox. Grid (rows, blocks).
extern "C" __global__ void combine(CombineShape shape, StrataMailbox* box, RoundState* state,
                                   const unsigned char* by_cpu, const float* parts, const float* mailed,
                                   const unsigned char* mailed_flags, const float* weights, float* y,
                                   unsigned char* flags) {
    __shared__ int some, answered;
    const int row = blockIdx.x, k = shape.top_k;
    if (threadIdx.x == 0) {
        some = 0;
        for (int part = 0; part < k; ++part) some |= by_cpu[row * k + part];
        answered = some != 0 && await_answer(shape, box, state);
    }
    __syncthreads();
    if (answered && threadIdx.x == 0 && mailed_flags[row] != 0) flags[row] = 1;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= shape.hidden) return;
    float total = 0.0f;
    for (int part = 0; part < k; ++part) {
        const long long at = static_cast<long long>(row * k + part) * shape.hidden + i;
        float value = 0.0f;
        if (!by_cpu[row * k + part]) value = parts[at];
        else if (answered) value = mailed[at];
        total = fused(weights[row * k + part], value, total);
    }
    const bool finite = is_finite(total);
    y[static_cast<long long>(row) * shape.hidden + i] = finite ? total : 0.0f;
    if (!finite) flags[row] = 1;
}

// Writes what the host wants of a round to memory that it reads: so many values of the logits, the best ids (-1 where the
// best logit is not finite) if a row has any columns, flags, how it ended. Grid: any.
extern "C" __global__ void publish(const float* logits, float* host_logits, int columns, int values, const int* best,
                                   int* host_best, const unsigned char* flags, unsigned char* host_flags, int rows,
                                   const int* inputs_ticket, const RoundState* state, StrataMailbox* box) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < values; i += step) host_logits[i] = logits[i];
    if (blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        if (columns > 0) {
            const int id = best[i];
            host_best[i] = id >= 0 && is_finite(logits[static_cast<long long>(i) * columns + id]) ? id : -1;
        }
        host_flags[i] = flags[i];
    }
    if (threadIdx.x == 0) {
        box->aborted = state->aborted;
        box->aborted_layer = state->aborted_layer;
        box->hits = state->hits;
        box->aliases = state->aliases;
        box->others = state->others;
        __threadfence_system();
        box->ended = static_cast<unsigned>(inputs_ticket[0]);
    }
}
