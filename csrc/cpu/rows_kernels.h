// The templates of one instruction set, gathered. Included once inside a level's namespace, after its Lanes: no
// include guard, and nothing from the standard library may be inlined here (a function shared between translation
// units with different flags would be merged by the linker).

constexpr int kParts = 16 / kWidth;  // Lanes that make the 16 lanes of a sum

// Applies f(offset, Lanes count) over `count` elements; the last call may be partial.
template <class F>
static inline void each_lanes(int64_t count, F f) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) f(i, kWidth);
  if (i < count) f(i, static_cast<int>(count - i));
}
static inline Lanes take(const float* p, int count) { return count >= kWidth ? load(p) : load_some(p, count); }
static inline void put(float* p, Lanes a, int count) {
  if (count >= kWidth)
    store(p, a);
  else
    store_some(p, a, count);
}
#include "rows_functions.h"
#include "rows_linear.h"
#include "rows_q8.h"
#include "rows_pointwise.h"
#include "rows_attention.h"
#include "rows_streams.h"
#include "rows_delta.h"
#include "rows_index.h"

static constexpr RowsTable make_table(const char* name) {
  return RowsTable{name,           linear,        linear_packed,    pack_rows,      encode_rows,     linear_q8,
                   embedding,      rms_norm,      rope,             attention_split, attention_fold, attention_finish,
                   router,         silu_mul,      sigmoid_mul,      sigmoid_scale,  add_rows,        argmax,
                   stream_norm,    silu_divided,  twice_sigmoid,    stream_mean,    stream_add,      ngram_gate,
                   causal_conv,    unit_length,   delta_gates,      delta_columns,  gated_delta,     gated_norm,
                   block_mean,     block_scores,  function,         fma_rounds,       kTileRows,       kQ8Rows};
}
