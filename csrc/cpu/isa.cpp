#include "isa.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>


namespace strata {
namespace {

thread_local char last_error[512] = "";

bool available(int level) {
    switch (level) {
        case kScalar:
            return true;
#if defined(__x86_64__)
        case kAvx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case kAvxVnni:
            return available(kAvx2) && __builtin_cpu_supports("avxvnni");
        case kAvx512:
            return available(kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni");
#endif
        default:
            return false;
    }
}

int best() {
    for (int level = kIsaLevels - 1; level > kScalar; --level)
        if (available(level)) return level;
    return kScalar;
}

std::atomic<int>& level_in_force() {
    static std::atomic<int> level{best()};
    return level;
}

}  // namespace

int fail(int status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

IsaLevel isa_level() { return static_cast<IsaLevel>(level_in_force().load(std::memory_order_relaxed)); }

}  // namespace strata

const char* strata_last_error() { return strata::last_error; }

int strata_isa_best() { return strata::best(); }

int strata_isa_level() { return strata::isa_level(); }

int strata_isa_available(int level) { return strata::available(level) ? 1 : 0; }

int strata_isa_select(int level) {
    if (!strata::available(level))
        return strata::fail(strata::kUnavailable, "instruction set level %d is not available on this processor", level);
    strata::level_in_force().store(level, std::memory_order_relaxed);
    return strata::kOk;
}
