// Makes pages exist before anybody waits for one. It must not know what they are for.
#pragma once

#include <cstdint>

#include "status.h"

// Makes the pages of [address, address + nbytes) exist, as zeros, in steps that end at multiples of `step` bytes (a
// multiple of a page). The kernel holds the map of the process all along one step; whoever takes or gives back memory
// waits for its end. Only for memory that nobody has written: where the kernel cannot make pages, zeros are written.
// Returns the number of steps.
STRATA_API int64_t strata_touch_pages(uint64_t address, uint64_t nbytes, uint64_t step);
