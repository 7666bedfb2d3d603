// Which instruction set the native kernels use: found once, or forced with strata_isa_select().
// Every kernel keeps one table of functions indexed by level and asks isa_level() at each call. All levels give
// the same bits; the level is a matter of speed alone.
#pragma once

#include "status.h"

namespace strata {

enum IsaLevel : int {
    kScalar = 0,
    kAvx2 = 1,     // AVX2, FMA, F16C
    kAvxVnni = 2,  // the same and AVX-VNNI (256-bit vpdpbusd)
    kAvx512 = 3,   // AVX-512 F, BW, VL, DQ and VNNI
    kIsaLevels = 4,
};

// The level in force.
IsaLevel isa_level();

}  // namespace strata

// The best level of this processor.
STRATA_API int strata_isa_best();
// The level in force.
STRATA_API int strata_isa_level();
// Whether this processor runs the level.
STRATA_API int strata_isa_available(int level);
// Puts a level in force; kUnavailable if the processor lacks it. Not while another call is running.
STRATA_API int strata_isa_select(int level);
