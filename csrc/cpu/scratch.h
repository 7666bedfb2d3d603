// Memory for intermediate results that a thread keeps from call to call.
//
// What lies in it from the call before is never read. Tests prove it: strata_scratch_poison(1) lets every later take fill
// the memory with bytes of 0xFF, which are NaN as FP32, BF16 and FP16 (decision record 0110).
#pragma once

#include <cstddef>
#include <cstdlib>

#include "status.h"

namespace strata {

// Fills the memory if tests asked for it.
void poison_scratch(void* memory, std::size_t bytes);

// Grown when a call needs more; never shrunk, freed with its thread.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    // `bytes` aligned to a cache line, contents undefined; null if they cannot be had.
    void* take(std::size_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            const std::size_t rounded = (bytes + 63) / 64 * 64;
            memory_ = std::aligned_alloc(64, rounded);
            size_ = memory_ == nullptr ? 0 : rounded;
        }
        if (memory_ != nullptr) poison_scratch(memory_, bytes);
        return memory_;
    }

  private:
    void* memory_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace strata

// From now on scratch is filled with 0xFF at every take (`on` not 0), or left as it is. For tests.
STRATA_API void strata_scratch_poison(int on);
