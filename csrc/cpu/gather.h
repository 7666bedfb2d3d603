// Gathers rows of a table from its file: many positioned reads at once, each row checked against its own word.
// The row layout is docs/reference/pack-format.md's; what a row's payload means is not known here.
#pragma once

#include <cstdint>

extern "C" {
// Reads rows ids[0..count) of `row_bytes` bytes (the check word included) of the open file `descriptor` into `out`, one
// after another. Large gathers run on the pool, so a disk sees as many reads at once as there are threads.
// A row that cannot be read whole, or whose word is wrong, is kTaskFault: *bad_row is its number, and *bad_errno the
// system's error, 0 for a file that ends early, -1 for a wrong word.
int strata_gather_rows(int descriptor, int64_t row_bytes, const int64_t* ids, int64_t count, void* out, int64_t* bad_row,
                       int* bad_errno);
}
