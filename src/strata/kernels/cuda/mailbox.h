// The mailbox between a decode round on a GPU and the CPU's workers: page-locked memory that both address. One text for
// csrc/cpu/conductor.cpp and for round.cu (compiled at run time: no includes).
//
// A layer is one exchange. The GPU writes rows, tasks and picks, then `posted` with release; the conductor, which polls
// it with acquire, computes the experts, writes results and flags, then `done` = the same number with release. There is
// never more than one exchange under way, so one set of arrays serves all layers. Whoever sees `abort` stops waiting.
#pragma once

// An expert of the CPU's list and its picks [first, first + count).
struct StrataMailTask {
    int expert, first, count;
};

struct StrataMailbox {
    // The GPU's line.
    unsigned posted;  // number of the exchange
    int layer, num_tasks, num_picks, num_rows;
    unsigned unused_gpu[11];
    // The conductor's line.
    unsigned done;   // number of the exchange that was answered last
    unsigned abort;  // not zero: no answer will come, nothing may wait
    unsigned unused_cpu[14];
    // What the last round says at its end; written by the GPU.
    unsigned ended;          // the round's number
    unsigned aborted;        // 0, or why it ended early: see kAborted...
    int aborted_layer;       // of the first wait that was given up
    unsigned unused_end;
    unsigned long long hits, aliases, others;  // experts computed from VRAM, over the link, by the CPU since the start
    unsigned unused_tail[6];
};

// In place of a layer: the CPU copies row 0 of what it was given to row 0 of what it answers, to show that both sides see
// what the other has written while a launch runs.
constexpr int kProbeLayer = -2;

constexpr unsigned kAbortedByHost = 1;      // the abort word
constexpr unsigned kAbortedByDeadline = 2;  // nobody answered in time
