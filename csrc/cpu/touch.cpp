// Makes pages of fresh memory exist by writing to each of them. A fault of one page is served under a lock of its own
// mapping (Linux 6.4 and later); asking the kernel for a whole range (madvise) holds that of all mappings, and every
// thread that maps or unmaps memory meanwhile waits for it.
#include <cstddef>

#define STRATA_EXPORT __attribute__((visibility("default")))

extern "C" {

// One byte of each `page` bytes becomes zero. Only for memory that nobody has written.
STRATA_EXPORT void strata_touch_pages(void* address, size_t nbytes, size_t page) {
    volatile char* const bytes = static_cast<volatile char*>(address);
    for (size_t at = 0; at < nbytes; at += page) bytes[at] = 0;
}
}
