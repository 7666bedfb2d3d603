// Gathers rows of a table from its file as FP32: many positioned reads at once, each row checked against its own word
// and decoded where it was read. The row layout is docs/reference/pack-format.md's; what the values mean is not known.
#pragma once

#include <cstdint>

extern "C" {
// Reads rows ids[0..count) of the open file `descriptor` and writes `columns` floats each to `out`, one row after
// another. `format`: 0 f32, 1 bf16, 2 q8_0, 3 f8_e4m3. Large gathers run on the pool, so a disk sees as many reads at
// once as there are threads. A row that cannot be read whole, or whose word is wrong, is kTaskFault: *bad_row is its
// number (of the first in `ids`, whatever the timing), and *bad_errno the system's error, 0 for a file that ends early,
// -1 for a wrong word.
int strata_gather_rows(int descriptor, int format, int64_t columns, const int64_t* ids, int64_t count, float* out,
                       int64_t* bad_row, int* bad_errno);
// Bytes of one row, its word included; 0 for a format there is not.
int64_t strata_table_row_bytes(int format, int64_t columns);
}

namespace strata {
// The check word of row `number` from the `nbytes` before it.
uint32_t table_check_word(const unsigned char* row, int64_t nbytes, int64_t number);
}  // namespace strata
