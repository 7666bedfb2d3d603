// The plain C interface of the row kernels: picks the instruction set, splits the work over the pool.
//
// Splitting never decides a result (rows.h). Grains aim at 5 to 10 us a slice; what is smaller runs on the caller
// and wakes nobody.
#include "rows.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "status.h"

namespace strata {
namespace {

const RowsTable& table() {
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

int64_t at_least_one(int64_t x) { return x < 1 ? 1 : x; }

// Loops over `rows` rows of `columns` elements each.
template <class Function>
int over_rows(int64_t rows, int64_t columns, Function&& f) {
  return parallel(rows, at_least_one(kElementsOfSlice / at_least_one(columns)), f);
}

// Attention states in one block of memory that a thread keeps between calls.
float* scratch(size_t count) {
  thread_local std::vector<float> kept;
  if (kept.size() < count) kept.resize(count);
  return kept.data();
}

int64_t state_floats(int64_t queries, int64_t width) { return queries * (width + 2); }

AttentionState state_at(float* base, int64_t queries) {
  return AttentionState{base, base + queries, base + 2 * queries};
}

struct AttentionPlan {
  AttentionCall call;
  int64_t share, rows_of_task, row_tasks, runs;

  int64_t last_row(int64_t task) const { return std::min((task + 1) * rows_of_task, call.rows); }
  int64_t entries(int64_t last) const {
    if (!call.list) return call.start + last;
    int64_t most = 0;
    for (int64_t t = 0; t < last; t++) most = std::max<int64_t>(most, call.list_count[t]);
    return most;
  }
};

// Folds the splits of one run for rows [first, last): `run` is written, `part` is room for one split.
void run_state(const AttentionPlan& plan, int64_t group, int64_t first, int64_t last, int64_t run, int64_t splits,
               const AttentionState& into, const AttentionState& part) {
  const RowsTable& kernels = table();
  const int64_t queries = (last - first) * plan.share, end = std::min((run + 1) * kRun, splits);
  kernels.attention_split(plan.call, group, first, last, run * kRun, into);
  for (int64_t split = run * kRun + 1; split < end; split++) {
    kernels.attention_split(plan.call, group, first, last, split, part);
    kernels.attention_fold(into, part, queries, plan.call.width);
  }
}

// Whole rows: each task folds all of its runs.
int attend_by_rows(const AttentionPlan& plan, int64_t grain) {
  return parallel(plan.call.groups * plan.row_tasks, grain, [&](long begin, long end) {
    for (long task = begin; task < end; task++) {
      // Late rows see most: they go first so that threads end together.
      const int64_t group = task % plan.call.groups, block = plan.row_tasks - 1 - task / plan.call.groups;
      const int64_t first = block * plan.rows_of_task, last = plan.last_row(block), width = plan.call.width;
      const int64_t queries = (last - first) * plan.share, floats = state_floats(queries, width);
      const int64_t splits = (plan.entries(last) + kSplit - 1) / kSplit;
      float* room = scratch(3 * floats);
      const AttentionState all = state_at(room, queries), run = state_at(room + floats, queries),
                           part = state_at(room + 2 * floats, queries);
      run_state(plan, group, first, last, 0, splits, all, part);
      for (int64_t i = 1; i * kRun < splits; i++) {
        run_state(plan, group, first, last, i, splits, run, part);
        table().attention_fold(all, run, queries, width);
      }
      table().attention_finish(plan.call, group, first, last, all);
    }
  });
}

// Few rows over a long list: each task computes one run, the caller folds them.
int attend_by_runs(const AttentionPlan& plan) {
  const AttentionCall& call = plan.call;
  const int64_t queries = call.rows * plan.share, floats = state_floats(queries, call.width);
  const int64_t splits = (plan.entries(call.rows) + kSplit - 1) / kSplit;
  std::vector<float> states(static_cast<size_t>(call.groups * plan.runs * floats));
  const int status = parallel(call.groups * plan.runs, 1, [&](long begin, long end) {
    for (long task = begin; task < end; task++) {
      const AttentionState part = state_at(scratch(static_cast<size_t>(floats)), queries);
      const AttentionState run = state_at(states.data() + task * floats, queries);
      run_state(plan, task / plan.runs, 0, call.rows, task % plan.runs, splits, run, part);
    }
  });
  if (status != kOk) return status;
  return parallel(call.groups, call.groups, [&](long begin, long end) {
    for (long group = begin; group < end; group++) {
      float* base = states.data() + group * plan.runs * floats;
      const AttentionState all = state_at(base, queries);
      for (int64_t i = 1; i < plan.runs; i++)
        table().attention_fold(all, state_at(base + i * floats, queries), queries, call.width);
      table().attention_finish(call, group, 0, call.rows, all);
    }
  });
}

int attend_all(const AttentionCall& call) {
  if (call.groups < 1 || call.heads % call.groups != 0 || call.heads / call.groups > kQueries)
    return fail(kBadArgument, "%ld query heads on %ld key/value heads: at most %ld each", long(call.heads),
                long(call.groups), long(kQueries));
  if (call.width < 1 || call.width > kMostWidth)
    return fail(kBadArgument, "attention heads of %ld, at most %ld", long(call.width), long(kMostWidth));
  if (call.rows == 0) return kOk;
  AttentionPlan plan{call, call.heads / call.groups, 1, call.rows, 1};
  plan.rows_of_task = call.list ? 1 : at_least_one(kQueries / plan.share);
  plan.row_tasks = (call.rows + plan.rows_of_task - 1) / plan.rows_of_task;
  const int64_t entries = plan.entries(call.rows);
  plan.runs = (entries + kRun * kSplit - 1) / (kRun * kSplit);
  const int64_t tasks = call.groups * plan.row_tasks;
  const bool tiny = call.rows * call.heads * call.width * entries < kProductsOfSlice;
  if (tasks < 2 * pool_threads() && plan.runs > 1) return attend_by_runs(plan);
  return attend_by_rows(plan, tiny ? tasks : 1);
}

}  // namespace
}  // namespace strata

using strata::WeightRows;

#pragma GCC visibility push(default)
extern "C" {

int strata_rows_linear(const float* x, int64_t rows, int format, const void* data, const uint16_t* scales,
                       int64_t outputs, int64_t columns, int64_t stride, float* y) {
  const WeightRows w{format, data, scales, columns, stride, stride / 32, nullptr};
  const int64_t units = (outputs + 7) / 8;
  const int64_t grain = strata::at_least_one(strata::kProductsOfSlice / (8 * columns * (rows + 1)));
  return strata::parallel(units, grain, [&](long begin, long end) {
    strata::table().linear(x, columns, rows, w, begin * 8, std::min<int64_t>(end * 8, outputs), y, outputs);
  });
}

int strata_rows_embedding(const int64_t* ids, int64_t rows, int format, const void* data, const uint16_t* scales,
                          int64_t vocabulary, int64_t columns, int64_t stride, float* y) {
  for (int64_t t = 0; t < rows; t++)
    if (ids[t] < 0 || ids[t] >= vocabulary)
      return strata::fail(strata::kBadArgument, "token id %ld, the table has %ld rows", long(ids[t]), long(vocabulary));
  const WeightRows w{format, data, scales, columns, stride, stride / 32, nullptr};
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().embedding(ids + begin, end - begin, w, y + begin * columns);
  });
}

int strata_rows_rms_norm(const float* x, const float* weight, float eps, int plus_one, int64_t rows, int64_t columns,
                         float* y) {
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().rms_norm(x + begin * columns, weight, eps, plus_one, end - begin, columns, y + begin * columns);
  });
}

int strata_rows_rope(const float* x, const float* cosine, const float* sine, int64_t rows, int64_t heads,
                     int64_t width, int64_t half, float* y) {
  const int64_t row = heads * width;
  return strata::over_rows(rows, row, [&](long begin, long end) {
    strata::table().rope(x + begin * row, cosine + begin * half, sine + begin * half, end - begin, heads, width, half,
                         y + begin * row);
  });
}

int strata_rows_attention(const float* q, const void* k, const void* v, int format, int64_t rows, int64_t heads,
                          int64_t groups, int64_t width, int64_t start, float scale, float* o) {
  return strata::attend_all(strata::AttentionCall{q, k, v, o, nullptr, nullptr, 0, rows, heads, groups, width, start,
                                                  format, scale});
}

int strata_rows_router(const float* logits, int64_t rows, int64_t experts, int64_t top_k, int renormalise,
                       int32_t* ids, float* weights) {
  return strata::over_rows(rows, experts * 8, [&](long begin, long end) {
    strata::table().router(logits + begin * experts, end - begin, experts, top_k, renormalise, ids + begin * top_k,
                           weights + begin * top_k);
  });
}

int strata_rows_silu_mul(const float* gate, const float* up, int64_t count, float* y) {
  return strata::parallel(count, strata::kElementsOfSlice, [&](long begin, long end) {
    strata::table().silu_mul(gate + begin, up + begin, end - begin, y + begin);
  });
}

int strata_rows_sigmoid_mul(const float* gate, const float* x, int64_t count, float* y) {
  return strata::parallel(count, strata::kElementsOfSlice, [&](long begin, long end) {
    strata::table().sigmoid_mul(gate + begin, x + begin, end - begin, y + begin);
  });
}

int strata_rows_sigmoid_scale(const float* gate, const float* x, int64_t rows, int64_t columns, float* y) {
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().sigmoid_scale(gate + begin, x + begin * columns, end - begin, columns, y + begin * columns);
  });
}

int strata_rows_add(const float* x, const float* y, int64_t count, float* z) {
  return strata::parallel(count, 4 * strata::kElementsOfSlice, [&](long begin, long end) {
    strata::table().add(x + begin, y + begin, end - begin, z + begin);
  });
}

int strata_rows_argmax(const float* logits, int64_t rows, int64_t columns, int64_t* ids) {
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().argmax(logits + begin * columns, end - begin, columns, ids + begin);
  });
}

// exp, sigmoid, silu, softplus as the kernels compute them: `which` 0 to 3.
int strata_rows_function(int which, const float* x, int64_t count, float* y) {
  return strata::parallel(count, strata::kElementsOfSlice,
                          [&](long begin, long end) { strata::table().function(which, x + begin, end - begin, y + begin); });
}
}
#pragma GCC visibility pop
