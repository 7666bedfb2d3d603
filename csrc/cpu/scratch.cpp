// Whether scratch is poisoned (scratch.h).
#include "scratch.h"

#include <atomic>
#include <cstring>

namespace strata {
namespace {
std::atomic<bool> poisoned{false};
}

void poison_scratch(void* memory, std::size_t bytes) {
    if (poisoned.load(std::memory_order_relaxed)) std::memset(memory, 0xFF, bytes);
}

}  // namespace strata

void strata_scratch_poison(int on) { strata::poisoned.store(on != 0, std::memory_order_relaxed); }
