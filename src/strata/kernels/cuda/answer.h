// The CPU's answer to an exchange, as blocks of a launch wait for it: round.cu's sum, and expert.cu's down.
#pragma once
#include "mailbox.h"
#include "device.h"

namespace strata {
namespace round {

// Blocks that wait for the same answer: the number of the exchange that one of them asks for, and of that which it has told
// the others of.
struct Hearing {
    unsigned asked, told;
};

// Of a round, in device memory.
struct RoundState {
    unsigned base;     // number of the first exchange
    unsigned aborted;  // kAborted..., sticky until the next round
    int aborted_layer;
    unsigned unused;
    Hearing sums, halves;  // of results that are added up, and of those that are multiplied by down first
    unsigned long long deadline;
    unsigned long long hits, aliases, others;
};

enum class Answer { kNone, kTold, kHeard };  // the round is given up; another block has told; this one is to tell

// Waits for the CPU's part of `layer`; thread 0 of a block. Readings of one line of the host's memory follow one another,
// each about a microsecond after the last, so forty blocks that look at it would learn of the answer one by one. The first
// block that comes here looks, reads what it is alone to read, and tells the others in device memory.
__device__ __forceinline__ Answer await_answer(int layer, unsigned wanted, StrataMailbox* box, RoundState* state,
                                               Hearing* hearing) {
    if (atomicExch(&hearing->asked, wanted) == wanted) {
        for (;; device::pause()) {
            if (device::hear(&hearing->told) == wanted) return Answer::kTold;
            if (device::hear(&state->aborted) != 0) return Answer::kNone;
        }
    }
    if (device::hear(&state->aborted) != 0) return Answer::kNone;
    for (;; device::pause()) {
        const uint2 answer = device::load_pair_acquire(&box->done);  // done, abort
        if (answer.x == wanted) return Answer::kHeard;
        if (answer.y != 0 || device::nanoseconds() > state->deadline) {
            state->aborted_layer = layer;
            device::tell(&state->aborted, answer.y != 0 ? kAbortedByHost : kAbortedByDeadline);
            return Answer::kNone;
        }
    }
}

__device__ __forceinline__ unsigned number_of(const RoundState* state, int exchange) {
    return state->base + static_cast<unsigned>(exchange) + 1u;
}

}  // namespace round
}  // namespace strata
