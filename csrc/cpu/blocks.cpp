// The sizes at which kernels of rows change their path, by their names in the source: rows of a call and, for kSplit,
// positions that a row sees. `strata verify` takes its prompt lengths from them, so a size that a kernel gets is listed
// here (tests/kernels/test_blocks.py reads the sources).
#include "blocks.h"
#include "rows_dispatch.h"

// The size number `index` of the instruction set in force goes to `size`; returns its name, or null past the last.
STRATA_API const char* strata_block(int index, int64_t* size) {
  using namespace strata;
  const ExpertBlocks experts = expert_blocks();
  const struct {
    const char* name;
    int64_t size;
  } blocks[] = {
      {"kTileRows", table().tile_rows},
      {"kQ8Rows", table().q8_rows},
      {"kPackRows", kPackRows},
      {"kBlockRows", kBlockRows},
      {"kSlabRows", kSlabRows},
      {"2 * kSlabRows", 2 * kSlabRows},
      {"kQueries", kQueries},
      {"kSplit", kSplit},
      {"kScoredRows", kScoredRows},
      {"kRowsAtOnce", experts.rows_at_once},
      {"kPanelRows", experts.panel_rows},
      {"kMostRows", experts.most_rows},
  };
  if (index < 0 || index >= static_cast<int>(sizeof blocks / sizeof *blocks)) return nullptr;
  *size = blocks[index].size;
  return blocks[index].name;
}
