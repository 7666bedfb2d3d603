// How native code reports a mistake: every exported call returns a status, and the words of the last one
// on this thread are read with strata_last_error(). Native code never prints, throws across the C interface,
// or aborts. It must not know Python.
#pragma once

// Marks a function that Python calls: C linkage, exported (all else in the library is hidden).
#define STRATA_API extern "C" __attribute__((visibility("default")))

namespace strata {

enum Status : int {
    kOk = 0,
    kBadArgument = 1,   // a null or misaligned address, a size out of range
    kNoMemory = 2,      // scratch could not be had
    kTaskFault = 3,     // a task of a parallel call failed; the words say which
    kUnavailable = 4,   // an instruction set or a feature that this machine does not have
    kFileFault = 5,     // a task read a mapped file where it cannot be read (task_guard.h)
    kMemoryFault = 6,   // a task touched memory that is not there
};

// Keeps the words (printf form) for strata_last_error() of the calling thread and returns `status`.
int fail(int status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace strata

// Words of the last failed call on this thread; "" if there was none. Valid until this thread's next failure.
STRATA_API const char* strata_last_error();
