// A fault of memory inside a task is an error of its call: a file that was cut while it is mapped (SIGBUS), an address
// that is not mapped (SIGSEGV).
//
// The process's handlers of both signals are replaced once, at the first guarded task. Ours acts only on a thread that is
// inside a guarded task, and only on a fault of its own instruction; everything else goes on to the handler that was
// there before (Python's faulthandler, the default action). A task is left in the middle, without destructors: what runs
// guarded holds no lock and owns no memory but what its thread keeps. It must not know what a task computes.
#pragma once

#include <type_traits>

namespace strata {

// Runs task(context). Returns its status, or kMemoryFault or kFileFault, with words, where it touched memory that is not
// there. May be nested; the innermost ends.
int guarded(int (*task)(void*), void* context);

// The same for a lambda `int()`.
template <class Function>
int guarded(Function&& function) {
    using Plain = std::remove_reference_t<Function>;
    return guarded([](void* context) -> int { return (*static_cast<Plain*>(context))(); },
                   const_cast<void*>(static_cast<const void*>(&function)));
}

}  // namespace strata
