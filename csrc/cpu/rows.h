// The row kernels of a CPU decode round: everything in a block that is not a routed expert.
//
// The law: row t of a result is the same bits whatever the number of rows, whatever the other rows hold, for any
// number of threads and on every instruction set. It is kept by construction:
//   - a sum over columns runs in 16 FP32 lanes, lane = column mod 16, in column order, one FMA a column, the last
//     columns padded with zeros; the lanes are added by one tree: i + (i + 8), then + 4, + 2, + 1; a dense product does
//     so for every 512 columns and adds these in order;
//   - a Q8_0 product takes exact integer sums of four products into such lanes (rows_q8.h);
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

constexpr int64_t kPanel = 512;       // columns that are summed before they are added: part of the result
constexpr int64_t kBlockRows = 96;    // rows of a block of a product with many: 198 KiB a panel, in the second level
constexpr int64_t kMostChunk = 256;   // outputs that share it: 96 KiB of y
constexpr int64_t kPackRows = 32;     // from so many rows on, x is cut into panels first

// Packed rows: blocks of kBlockRows rows, in a block panel after panel, in a panel row after row.
constexpr int64_t kPackedRow = kPanel + 16;
constexpr int64_t kPackedPanel = kBlockRows * kPackedRow;
inline int64_t packed_block(int64_t columns) { return (columns + kPanel - 1) / kPanel * kPackedPanel; }

// Rows of x as a Q8_0 product reads them (rows_q8.h): codes of 16 bits, a unit for every 32 of them, and their strides.
// Columns are padded to an even number of blocks; 32 more keep the panels of rows off the same cache sets.
struct CodedShape {
  int64_t codes, units;
};
inline CodedShape coded_shape(int64_t columns) {
  const int64_t padded = (columns + 63) / 64 * 64;
  return CodedShape{padded + 32, padded / 32};
}
struct CodedRows {
  const int16_t* codes;
  const float* units;
  CodedShape shape;
};

constexpr int64_t kSplit = 256;       // list entries of one softmax split
constexpr int64_t kRun = 4;           // splits of a run, the unit that threads share a long list by
constexpr int64_t kQueries = 48;      // queries of one pass: their scores (48 KiB) stay in the second level
constexpr int64_t kMostWidth = 256;   // widest attention head
constexpr int64_t kScoredRows = 48;   // rows whose block scores wait together: 6 MiB at 32,768 blocks

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

// Rows [first, last) of a depthwise causal convolution over rows of C channels; `tail` holds the (taps - 1) * dilation
// rows before row 0 of x.
struct ConvCall {
  const float* x;
  const float* tail;
  const float* weight;  // C x taps
  int64_t first, last, channels, taps, dilation;
};

constexpr int64_t kMostTaps = 8;

// Rows of the delta rule. `decay` is e^g.
struct DeltaRowsView {
  const float* k;
  const float* v;
  const float* beta;
  const float* decay;
  int64_t rows;
};

struct DeltaCall {
  DeltaRowsView pending, now;
  const float* q;
  float* state;  // N x D x V
  float* o;
  int64_t key_heads, value_heads, key_width, value_width;
  int write;
};

struct NgramCall {
  const float* key;
  const float* value;
  const float* x;
  const float* norm_key;
  const float* norm_query;
  const float* norm_conv;
  float eps;
  int64_t rows, streams, columns;
  float* gated;
  float* normed;
};

struct RowsTable {
  const char* name;
  void (*linear)(const float* x, int64_t x_stride, int64_t rows, const WeightRows& weight, int64_t first, int64_t last,
                 float* y, int64_t y_stride);
  void (*linear_packed)(const float* packed, int64_t rows, const WeightRows& weight, int64_t first, int64_t last,
                        float* y, int64_t y_stride);
  void (*pack_rows)(const float* x, int64_t rows, int64_t columns, int64_t first, int64_t last, float* packed);
  void (*encode_rows)(const float* x, int64_t rows, int64_t columns, const CodedShape& shape, int16_t* codes,
                      float* units);
  void (*linear_q8)(const CodedRows& x, int64_t rows, const WeightRows& weight, int64_t first, int64_t last, float* y,
                    int64_t y_stride);
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
  void (*stream_norm)(const float* x, const float* weight, float eps, int64_t rows, int64_t streams, int64_t columns,
                      float* y);
  void (*silu_divided)(const float* x, float divisor, int64_t count, float* y);
  void (*twice_sigmoid)(const float* x, float divisor, int64_t count, float* y);
  void (*stream_mean)(const float* mix, const float* n, int64_t rows, int64_t streams, int64_t columns, float* u);
  void (*stream_add)(const float* x, const float* c, const float* y, int64_t rows, int64_t streams, int64_t columns,
                     float* out);
  void (*ngram_gate)(const NgramCall& call, int64_t first, int64_t last);
  void (*causal_conv)(const ConvCall& call, int64_t first, int64_t last, float* y, int64_t y_stride);
  void (*unit_length)(const float* x, float factor, int64_t count, int64_t width, float* y);
  void (*delta_gates)(const float* b, const float* a, const float* log_decay, const float* dt_bias, int64_t rows,
                      int64_t heads, float* beta, float* g);
  int64_t (*delta_columns)();
  void (*gated_delta)(const DeltaCall& call, int64_t head, int64_t column, float* room);
  void (*gated_norm)(const float* o, const float* z, const float* weight, float eps, int smooth, int64_t count,
                     int64_t width, float* y);
  void (*block_mean)(const float* raw, int64_t blocks, int64_t members, int64_t width, float* y);
  void (*block_scores)(const float* q, int64_t rows, int64_t heads, int64_t width, const float* keys, int64_t first,
                       int64_t last, float* y, int64_t y_stride);
  void (*function)(int which, const float* x, int64_t count, float* y);
  int64_t (*fma_rounds)(int64_t rounds, float* y);
  int64_t tile_rows, q8_rows;  // of a register tile
};

extern const RowsTable rows_table_scalar;
#if STRATA_HAVE_AVX2
extern const RowsTable rows_table_avx2;
#endif
#if STRATA_HAVE_AVX512
extern const RowsTable rows_table_avx512;
#endif

}  // namespace strata
