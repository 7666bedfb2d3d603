// The thread that answers a GPU's decode rounds: polls the mailbox, computes what the GPU left to the CPU, answers.
//
// Lives beside the expert kernel, which it calls; the pool's workers help. Between rounds it looks for the next one a
// moment, then sleeps; it never calls the driver, never takes the interpreter's lock, and never allocates while a round
// runs (but for the kernel's own scratch, grown by the first calls). It must not know a tier: addresses and file places
// are tables of the caller's.
#pragma once

#include <cstdint>

#include "../../src/strata/kernels/cuda/mailbox.h"
#include "status.h"

// Everything outlives the conductor; tables are changed only between rounds. Index of an expert: layer * E + expert.
struct StrataConductorConfig {
    StrataMailbox* mailbox;
    const float* x;               // rows of `hidden`
    const StrataMailTask* tasks;
    const int32_t* rows;          // of each pick: its row
    const int32_t* slots;         // of each pick: the row of `out` that it fills
    float* out;
    uint8_t* flags;               // of each row, set to 1 where a number is not finite
    int64_t hidden, intermediate, format, most_rows, most_picks;
    int64_t num_layers, num_experts;
    const uint64_t* address;      // of each expert in RAM, 0: in the file alone
    const uint8_t* kind;          // of each expert's address, below 8: what `by_kind` counts
    const float* scales;          // three of each expert
    uint8_t* checked;             // of each expert: 0, its bytes are compared with `checksum` before they are used
    const uint64_t* checksum;
    const int32_t* file;          // descriptor of each expert's file, or null where nothing is read in a round
    const int64_t* offset;
    int64_t blob_bytes;
    uint8_t* buffers;             // for experts that are read, `stride` bytes apart
    int64_t num_buffers, stride;
};

// Starts the thread. 0: `*conductor` is set.
STRATA_API int strata_conductor_open(const StrataConductorConfig* config, void** conductor);
// A round may post from now on. Waits up to `wait_ms` for the thread to be done with an earlier round that was given
// up; starts it again if it has died.
STRATA_API int strata_conductor_begin(void* conductor, int wait_ms);
// No round posts from now on. Returns the error of a task of this round, with its words.
STRATA_API int strata_conductor_end(void* conductor);
// For a host that hands rounds over layer by layer: waits up to `wait_ms` until what was posted is answered, or no answer
// will come any more.
STRATA_API int strata_conductor_settle(void* conductor, int wait_ms);
// Sets the mailbox's abort word; the next `begin` clears it.
STRATA_API void strata_conductor_abort(void* conductor);
STRATA_API void strata_conductor_close(void* conductor);

// For tests and `strata verify`: what goes wrong at exchange `number` (from 1) after the next begin.
// kind 1: the thread sleeps `ms` before it answers; 2: it ends without an answer; 3: it sets the abort word and
// answers no more in this round.
STRATA_API void strata_conductor_fault(void* conductor, int kind, int number, int ms);

struct StrataConductorCounters {
    int64_t exchanges, file_reads, restarts, settled;  // settled: exchanges that `settle` has waited for
    int64_t by_kind[8];        // experts computed
    int64_t wait_ns, work_ns;  // polling in rounds, computing
};
STRATA_API void strata_conductor_counters(void* conductor, StrataConductorCounters* counters);
