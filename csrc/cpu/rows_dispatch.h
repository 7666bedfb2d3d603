// What the C interface files of the row kernels share: the table in force and the sizes of slices.
//
// Splitting never decides a result (rows.h). Grains aim at 5 to 10 us a slice; what is smaller runs on the caller
// and wakes nobody.
#pragma once

#include <cstddef>

#include "isa.h"
#include "pool.h"
#include "rows.h"
#include "scratch.h"
#include "status.h"

namespace strata {

inline const RowsTable& table() {
  const IsaLevel level = isa_level();
  (void)level;
#if STRATA_HAVE_AVX512
  if (level == kAvx512) return rows_table_avx512;
#endif
#if STRATA_HAVE_AVX2
  if (level == kAvx2 || level == kAvxVnni) return rows_table_avx2;
#endif
  return rows_table_scalar;
}

constexpr int64_t kElementsOfSlice = 16384;     // of an elementwise operation
constexpr int64_t kProductsOfSlice = 131072;    // multiply-adds of a matrix product with many rows

inline int64_t at_least_one(int64_t x) { return x < 1 ? 1 : x; }

// Loops over `rows` rows of `columns` elements each.
template <class Function>
int over_rows(int64_t rows, int64_t columns, Function&& f) {
  return parallel(rows, at_least_one(kElementsOfSlice / at_least_one(columns)), f);
}

// Rows whose intermediate results wait together: bounds what a long chunk takes beside its plan (at most about 25 MiB a
// calling thread at hidden size 2,560 with four streams).
constexpr int64_t kSlabRows = 256;

// The scratch of this thread for one purpose: `Tag` tells apart what is in use at the same time.
template <class Tag, class T = float>
inline T* scratch(int64_t count) {
  thread_local Scratch kept;
  return static_cast<T*>(kept.take(static_cast<std::size_t>(count < 1 ? 1 : count) * sizeof(T)));
}

inline int no_scratch(const char* name) { return fail(kNoMemory, "%s: no memory for intermediate results", name); }

}  // namespace strata
