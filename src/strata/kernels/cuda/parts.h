// A kernel file that takes long to compile is compiled in parts, side by side (compile.py). What stands between
// `#if STRATA_IN(n)` and `#endif` belongs to part n alone, what stands outside to all of them; so an entry stands inside.
// Parts are counted from 0; part 0 is the one with the most machine code, which takes longest.
#pragma once

#if defined(STRATA_PART)
#define STRATA_IN(n) (STRATA_PART == (n))
#else
#define STRATA_IN(n) 1
#endif
