#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, since Linux 5.14; older headers lack the name

}  // namespace

STRATA_API int64_t strata_touch_pages(uint64_t address, uint64_t nbytes, uint64_t step) {
    const uint64_t end = address + nbytes, page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    step = std::max(step, page);
    int64_t steps = 0;
    for (; address < end; ++steps) {
        const uint64_t stop = std::min(end, (address / step + 1) * step), first = address / page * page;
        if (madvise(reinterpret_cast<void*>(first), stop - first, kPopulateWrite) != 0)
            std::memset(reinterpret_cast<void*>(address), 0, stop - address);
        address = stop;
    }
    return steps;
}
