// The row kernels of a CPU decode round: everything in a block that is not a routed expert.
//
// The law: row t of a result is the same bits whatever the number of rows, whatever the other rows hold, for any
// number of threads and on every instruction set. It is kept by construction:
//   - a sum over columns runs in 16 FP32 lanes, lane = column mod 16, in column order, one FMA a column, the last
//     columns padded with zeros; the lanes are added by one tree: i + (i + 8), then + 4, + 2, + 1;
//   - a sum over cache positions runs in list order within splits of 256 entries; four splits are folded in order
//     into a run, the runs in order into the result;
//   - functions (exp, sigmoid, silu, softplus) are our own polynomials with explicit FMA (rows_functions.h).
// One set of templates is compiled once for each instruction set (rows_scalar.cpp, rows_avx2.cpp, rows_avx512.cpp)
// into a RowsTable; rows.cpp chooses one, splits the work over the pool and is the plain C interface.
// Nothing here knows a model or a tier.
#pragma once

#include <cstdint>

namespace strata {

enum WeightFormat : int { kF32 = 0, kBf16 = 1, kQ8 = 2 };

// O rows of weights in memory. `stride` counts elements of `data` between rows, `scale_stride` scales between rows.
// With `index`, row o lies at index[o] (a gathered list of cache positions).
struct WeightRows {
  int format;
  const void* data;
  const uint16_t* scales;
  int64_t columns;
  int64_t stride;
  int64_t scale_stride;
  const int32_t* index;
};

constexpr int64_t kSplit = 256;       // list entries of one softmax split
constexpr int64_t kRun = 4;           // splits of a run, the unit that threads share a long list by
constexpr int64_t kQueries = 48;      // queries of one pass: their scores (48 KiB) stay in the second level
constexpr int64_t kMostWidth = 256;   // widest attention head

// One attention call over T rows of N query heads; q and o are T x N x D, k and v are P x G x D.
// Without `list`, row t sees positions [0, start + t]. With `list` (T x list_stride), row t sees the
// list_count[t] positions of its list, in that order.
struct AttentionCall {
  const float* q;
  const void* k;
  const void* v;
  float* o;
  const int32_t* list;
  const int32_t* list_count;
  int64_t list_stride;
  int64_t rows, heads, groups, width, start;
  int format;  // of k and v: kF32 or kBf16
  float scale;
};

// Softmax state of Q queries over some splits: running maximum, sum and weighted values (Q x D).
struct AttentionState {
  float* maximum;
  float* sum;
  float* values;
};

struct RowsTable {
  const char* name;
  void (*linear)(const float* x, int64_t x_stride, int64_t rows, const WeightRows& weight, int64_t first, int64_t last,
                 float* y, int64_t y_stride);
  void (*embedding)(const int64_t* ids, int64_t rows, const WeightRows& table, float* y);
  void (*rms_norm)(const float* x, const float* weight, float eps, int plus_one, int64_t rows, int64_t columns,
                   float* y);
  void (*rope)(const float* x, const float* cosine, const float* sine, int64_t rows, int64_t heads, int64_t width,
               int64_t half, float* y);
  void (*attention_split)(const AttentionCall& call, int64_t group, int64_t first, int64_t last, int64_t split,
                          const AttentionState& state);
  void (*attention_fold)(const AttentionState& running, const AttentionState& next, int64_t queries, int64_t width);
  void (*attention_finish)(const AttentionCall& call, int64_t group, int64_t first, int64_t last,
                           const AttentionState& state);
  void (*router)(const float* logits, int64_t rows, int64_t experts, int64_t top_k, int renormalise, int32_t* ids,
                 float* weights);
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* y);
  void (*sigmoid_mul)(const float* gate, const float* x, int64_t count, float* y);
  void (*sigmoid_scale)(const float* gate, const float* x, int64_t rows, int64_t columns, float* y);
  void (*add)(const float* x, const float* y, int64_t count, float* z);
  void (*argmax)(const float* logits, int64_t rows, int64_t columns, int64_t* ids);
  void (*function)(int which, const float* x, int64_t count, float* y);
};

extern const RowsTable rows_table_scalar;
#if STRATA_HAVE_AVX2
extern const RowsTable rows_table_avx2;
#endif
#if STRATA_HAVE_AVX512
extern const RowsTable rows_table_avx512;
#endif

}  // namespace strata
