// The 64-bit checksum of an expert blob: cheap enough for the thread that copies the blob, and certain for the
// damage that is most common: every change confined to one 8-byte word changes it (all steps are bijections).
// Definition: eight lanes of 64 bits take the words of the data in turn (little-endian, the tail padded with zeros);
// a lane does  lane = rotate_left(lane ^ word, 31) * kLaneMultiplier; the lanes are folded in order. See checksum.cpp.
// It must not know what the bytes mean.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Checksum of `nbytes` at `source` (any alignment). `nbytes` 0 is allowed.
uint64_t strata_checksum(const void* source, size_t nbytes);

// The same into `*sum`, for memory that may be gone, as that of a mapped file that was cut: a status, with words.
int strata_checksum_of(const void* source, size_t nbytes, uint64_t* sum);

// Copies `nbytes` from `source` to `target` (no overlap) and returns the checksum of what was copied, in one pass.
uint64_t strata_copy_with_checksum(void* target, const void* source, size_t nbytes);
}

namespace strata {

// The checksum of bytes that come in pieces. All but the last piece are multiples of 64 bytes.
class RunningChecksum {
  public:
    RunningChecksum();
    void take(const void* piece, size_t nbytes);
    uint64_t finish();  // once, after the last piece

  private:
    uint64_t lanes_[8];
    uint64_t nbytes_ = 0;
    const unsigned char* tail_ = nullptr;  // of the last piece, which outlives `finish`
};

}  // namespace strata
