// What a decode round is beside its layers: its start, the split of a layer's picks between the GPU and the CPU, the
// exchange with the CPU's workers, the sum over experts, its end. Compiled at run time by NVRTC, without contraction.
//
// Nothing here is timed or chosen by load: who computes an expert is a function of the tables and the picks, and both
// sides give the same bits. A round that is given up runs to its end without waiting for anybody: sums take zeros for
// what the CPU did not give, and the host repeats the round or ends the request.
#include "exact.h"
#include "mailbox.h"
#include "device.h"
#include "parts.h"
#include "post.h"
#include "products.h"

using namespace strata::exact;
using namespace strata::round;
using strata::rows::Activations;
using strata::rows::Matrices;
namespace device = strata::device;

#if STRATA_IN(5)
// Copies the inputs that the host wrote (ticket, limit in microseconds, then the round's `count` words) and resets what
// belongs to a round. One block.
extern "C" __global__ void begin(const int* host, int* inputs, int count, RoundState* state, int exchanges,
                                 unsigned char* flags, int rows) {
    device::let_next_start();
    device::wait_for_previous();
    for (int i = threadIdx.x; i < count; i += blockDim.x) inputs[i] = host[2 + i];
    for (int i = threadIdx.x; i < rows; i += blockDim.x) flags[i] = 0;
    if (threadIdx.x == 0) {
        state->base = static_cast<unsigned>(host[0]) * static_cast<unsigned>(exchanges + 1);
        state->aborted = 0;
        state->aborted_layer = -1;
        state->told = state->asked = state->base;
        state->deadline =
            device::nanoseconds() + static_cast<unsigned long long>(static_cast<unsigned>(host[1])) * 1000ull;
    }
}
#endif

// A layer's experts begin: block 0 routes, splits and posts, kQuantisers blocks a row quantise it, and the blocks behind
// compute products that wait for nothing else (a shared expert's last one; none: all.groups 0). Threads: at least as many as
// there are picks, and a warp a row.
#define STRATA_ROUTE(T, R, AHEAD, THREADS, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                 \
        route_##T##x##R(const PostShape shape, const PostTables tables, const PostList list, const PostMail mail, \
                        const Router router, RoundState* state, const float* x, signed char* codes, float* scales, \
                        unsigned char* flags, const Activations a, const Matrices all,                            \
                        const device::Ahead ahead) {                                                              \
        extern __shared__ float4 room[];                                                                          \
        const int others = 1 + shape.rows * kQuantisers, block = static_cast<int>(blockIdx.x) - others;           \
        device::let_next_start();                                                                                 \
        device::bring(ahead);                                                                                     \
        if (block >= 0) {                                                                                         \
            strata::rows::linears<T, R, AHEAD, strata::rows::kAny>(a, all, block, gridDim.x - others, room);         \
            return;                                                                                               \
        }                                                                                                         \
        if (blockIdx.x == 0) {                                                                                    \
            post<T == 1>(shape, tables, list, mail, router, x, state);                                            \
            return;                                                                                               \
        }                                                                                                         \
        device::wait_for_previous();                                                                              \
        quantise_row(shape, (blockIdx.x - 1) / kQuantisers, (blockIdx.x - 1) % kQuantisers, x, codes, scales,     \
                     flags);                                                                                      \
    }

#if STRATA_IN(0)
STRATA_ROUTE(8, 4, 3, 256, 1)
#endif
#if STRATA_IN(1)
STRATA_ROUTE(4, 4, 3, 256, 1)
#endif
#if STRATA_IN(2)
STRATA_ROUTE(1, 1, 6, 320, 2)
#endif
#if STRATA_IN(3)
STRATA_ROUTE(2, 2, 3, 256, 2)
#endif
#if STRATA_IN(4)
STRATA_ROUTE(1, 2, 3, 256, 2)
#endif

#if STRATA_IN(5)

struct CombineShape {
    int hidden, top_k, layer, exchange;
};

// Waits for the CPU's part of the layer; thread 0 of a block. Readings of one word of the host's memory follow one another,
// each about a microsecond after the last, so forty blocks that look at it would learn of the answer one by one. The first
// block that comes here looks, sets `asks`, and tells the others in device memory. Returns false when the round is given up.
__device__ bool await_answer(const CombineShape& shape, StrataMailbox* box, RoundState* state, int* asks) {
    const unsigned wanted = state->base + static_cast<unsigned>(shape.exchange) + 1u;
    *asks = atomicExch(&state->asked, wanted) != wanted;
    while (*asks == 0) {
        if (device::hear(&state->told) == wanted) return true;
        if (device::hear(&state->aborted) != 0) return false;
        device::pause();
    }
    if (device::hear(&state->aborted) != 0) return false;
    for (;; device::pause()) {
        const uint2 answer = device::load_pair_acquire(&box->done);  // done, abort
        if (answer.x == wanted) {
            device::tell(&state->told, wanted);
            return true;
        }
        if (answer.y != 0 || device::nanoseconds() > state->deadline) {
            state->aborted_layer = shape.layer;
            device::tell(&state->aborted, answer.y != 0 ? kAbortedByHost : kAbortedByDeadline);
            return false;
        }
    }
}

// What both sides write in a probe: numbers that belong to the exchange, exact in FP32.
__device__ __forceinline__ float probe_value(unsigned number, int i) {
    return static_cast<float>((number * 2654435761u + static_cast<unsigned>(i) * 40503u) >> 8);
}

// One exchange of the mailbox's self-test: posts `count` numbers, waits for the CPU's copy of them, and says how many
// nanoseconds that took in `times[exchange]`, host memory: -1 where no answer came or it is not the copy. One block.
extern "C" __global__ void probe(StrataMailbox* box, RoundState* state, int exchange, float* sent, const float* answer,
                                 int count, int* times) {
    __shared__ int answered;
    device::let_next_start();
    device::wait_for_previous();
    const unsigned number = state->base + static_cast<unsigned>(exchange) + 1u;
    const unsigned long long began = device::nanoseconds();
    for (int i = threadIdx.x; i < count; i += blockDim.x) sent[i] = probe_value(number, i);
    __syncthreads();
    if (threadIdx.x == 0) {
        box->layer = kProbeLayer;
        box->num_tasks = box->num_picks = 0;
        box->num_rows = 1;
        device::store_release(&box->posted, number);
        int asks = 0;
        answered = await_answer({count, 0, kProbeLayer, exchange}, box, state, &asks);
    }
    __syncthreads();
    const unsigned long long heard = device::nanoseconds();
    int same = answered;
    for (int i = threadIdx.x; same != 0 && i < count; i += blockDim.x) same = answer[i] == probe_value(number, i);
    same = __syncthreads_and(same);
    if (threadIdx.x == 0) times[exchange] = same != 0 ? static_cast<int>(heard - began) : -1;
}

// y[row] = sum over k, in order, by fused multiply-add from zero, of weights[row, k] * part[row, k]; a part is the GPU's
// own or lies in the mailbox. Grid (rows, blocks).
//
// Must be the second launch after gate and up, which let others start only when the launch before them is complete: what
// that one wrote, who computes which pick and the weights, is there when this one starts.
extern "C" __global__ void combine(CombineShape shape, StrataMailbox* box, RoundState* state,
                                   const unsigned char* by_cpu, const float* parts, const float* mailed,
                                   const unsigned char* mailed_flags, const float* weights, float* y,
                                   unsigned char* flags, const device::Ahead ahead, const device::Ahead idle) {
    constexpr int kBatch = 10;
    __shared__ int some, answered, asks;
    __shared__ unsigned char by_pick[kMostPicks];
    __shared__ float weight_of[kMostPicks];
    const int row = blockIdx.x, k = shape.top_k, rows = gridDim.x;
    device::let_next_start();
    device::bring(ahead);
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    const bool only_brings = static_cast<int>(blockIdx.y * blockDim.x) >= shape.hidden;
    if (threadIdx.x < 32) {
        int mine = 0;
        for (int part = threadIdx.x; part < k; part += 32) {
            mine |= by_pick[part] = by_cpu[row * k + part];
            weight_of[part] = weights[row * k + part];
        }
        some = __any_sync(0xFFFFFFFFu, mine);
    }
    __syncthreads();
    if (some != 0) device::bring(idle);  // the CPU takes longer than that
    if (!only_brings && threadIdx.x == 0) {
        asks = 0;
        answered = some != 0 && await_answer(shape, box, state, &asks);
    }
    device::wait_for_previous();
    if (only_brings) return;
    __syncthreads();
    // Of all rows by one block, for the same reason; nobody waits for it before the sum.
    const bool reads_flag = asks && answered && static_cast<int>(threadIdx.x) < rows;
    const unsigned char mailed_flag = reads_flag ? mailed_flags[threadIdx.x] : 0;
    if (i < shape.hidden) {
        float total = 0.0f;
        for (int first = 0; first < k; first += kBatch) {  // a batch of parts is under way at once
            float value[kBatch];
#pragma unroll
            for (int part = 0; part < kBatch; ++part) {
                if (first + part >= k) break;
                const bool is_mailed = by_pick[first + part] != 0;
                value[part] = 0.0f;
                if (!is_mailed || answered)
                    value[part] = (is_mailed ? mailed : parts)[static_cast<long long>(row * k + first + part) * shape.hidden + i];
            }
#pragma unroll
            for (int part = 0; part < kBatch; ++part)
                if (first + part < k) total = fused(weight_of[first + part], value[part], total);
        }
        const bool finite = is_finite(total);
        y[static_cast<long long>(row) * shape.hidden + i] = finite ? total : 0.0f;
        if (!finite) flags[row] = 1;
    }
    if (mailed_flag != 0) flags[threadIdx.x] = 1;
}

// Writes what the host wants of a round to memory that it reads: so many values of the logits, the best ids (-1 where the
// best logit is not finite) if a row has any columns, flags, how it ended. Grid: any.
extern "C" __global__ void publish(const float* logits, float* host_logits, int columns, int values, const int* best,
                                   int* host_best, const unsigned char* flags, unsigned char* host_flags, int rows,
                                   const int* inputs_ticket, const RoundState* state, StrataMailbox* box) {
    device::wait_for_previous();
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
#endif
