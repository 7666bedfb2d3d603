// Threads that bring expert blobs to where they are wanted: copies from pageable memory with stores that bypass the
// caches, reads from files, and bytes that are computed, each on its own ticket. Python submits and asks; it never copies itself.
//
// Lives beside the kernels because it is native and holds no lock of the interpreter. It must not know what a blob is,
// who owns its memory, or a device: the caller keeps both ends valid until the ticket is complete.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.h"

struct StrataStager;

// What became of a ticket. Positive values are the system's error numbers (errno) of a failed read.
enum StrataTicketState : int {
    kTicketDone = 0,
    kTicketPending = -1,
    kTicketTruncated = -2,  // the file ended before the read did
    kTicketDamaged = -3,    // the bytes do not have the checksum that was asked for
    kTicketRefused = -4,    // the function that computes the bytes refused its arguments
};

// Starts `threads` threads (1..256); null when they cannot be had.
STRATA_API StrataStager* strata_stager_create(int threads);
// Finishes what was submitted, then ends the threads.
STRATA_API void strata_stager_destroy(StrataStager* stager);
STRATA_API int strata_stager_threads(const StrataStager* stager);

// Copies `nbytes`; returns the ticket. Tickets rise by one. With `bypass` the stores go past the caches.
STRATA_API uint64_t strata_stager_copy(StrataStager* stager, void* target, const void* source, size_t nbytes, int bypass);
// Reads `nbytes` at `offset` of an open file; with `checked` their checksum must be `expected`.
STRATA_API uint64_t strata_stager_read(StrataStager* stager, int file, uint64_t offset, void* target, size_t nbytes,
                                       int checked, uint64_t expected);
// Writes `nbytes` to `target` and returns a Status; `recipe` holds kFillWords words.
typedef int (*StrataFill)(void* target, size_t nbytes, const uint64_t* recipe);
enum StrataFillWords : int { kFillWords = 8 };
// Computes bytes instead of moving them: runs `fill` on a copy of `recipe`. A failed fill is kTicketRefused.
STRATA_API uint64_t strata_stager_compute(StrataStager* stager, StrataFill fill, const uint64_t* recipe, void* target,
                                          size_t nbytes);
// State of a ticket without waiting, and after it is complete. A failed state is kept until the stager ends.
STRATA_API int strata_stager_query(StrataStager* stager, uint64_t ticket);
STRATA_API int strata_stager_wait(StrataStager* stager, uint64_t ticket);
