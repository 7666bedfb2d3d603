// Row counts of the expert kernels of the level in force, for those who cannot include expert.h beside rows.h.
#pragma once

#include <cstdint>

namespace strata {

struct ExpertBlocks {
  int64_t rows_at_once, panel_rows, most_rows;
};
ExpertBlocks expert_blocks();  // expert.cpp

}  // namespace strata
