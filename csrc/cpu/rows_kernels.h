// The templates of one instruction set, gathered. Included once inside a level's namespace, after its Lanes: no
// include guard, and nothing from the standard library may be inlined here (a function shared between translation
// units with different flags would be merged by the linker).

constexpr int kParts = 16 / kWidth;  // Lanes that make the 16 lanes of a sum

#include "rows_functions.h"
#include "rows_linear.h"
#include "rows_pointwise.h"
#include "rows_attention.h"

static constexpr RowsTable make_table(const char* name) {
  return RowsTable{name,           linear,   embedding, rms_norm,    rope,          attention_split,
                   attention_fold, attention_finish, router, silu_mul, sigmoid_mul, sigmoid_scale,
                   add_rows,       argmax,   function};
}
