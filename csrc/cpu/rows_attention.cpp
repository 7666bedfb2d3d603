// The C interface of attention: over a whole cache, over selected blocks, and the selection itself.
#include <algorithm>
#include <cstring>

#include "rows_dispatch.h"

namespace strata {
namespace {

int64_t state_floats(int64_t queries, int64_t width) { return queries * (width + 2); }

AttentionState state_at(float* base, int64_t queries) {
  return AttentionState{base, base + queries, base + 2 * queries};
}

struct AttentionPlan {
  AttentionCall call;
  int64_t share, rows_of_task, row_tasks, runs;

  int64_t last_row(int64_t task) const { return std::min((task + 1) * rows_of_task, call.rows); }
  // The longest list of rows [first, last).
  int64_t entries(int64_t first, int64_t last) const {
    if (!call.list) return call.start + last;
    int64_t most = 0;
    for (int64_t t = first; t < last; t++) most = std::max<int64_t>(most, call.list_count[t]);
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
      const int64_t splits = (plan.entries(first, last) + kSplit - 1) / kSplit;
      float* room = scratch<AttentionPlan>(3 * floats);
      if (room == nullptr) return no_scratch("attention");
      const AttentionState all = state_at(room, queries), run = state_at(room + floats, queries),
                           part = state_at(room + 2 * floats, queries);
      run_state(plan, group, first, last, 0, splits, all, part);
      for (int64_t i = 1; i * kRun < splits; i++) {
        run_state(plan, group, first, last, i, splits, run, part);
        table().attention_fold(all, run, queries, width);
      }
      table().attention_finish(plan.call, group, first, last, all);
    }
    return static_cast<int>(kOk);
  });
}

struct RunStates;

// Few rows over a long list: each task computes one run, the caller folds them.
int attend_by_runs(const AttentionPlan& plan) {
  const AttentionCall& call = plan.call;
  const int64_t queries = call.rows * plan.share, floats = state_floats(queries, call.width);
  const int64_t splits = (plan.entries(0, call.rows) + kSplit - 1) / kSplit;
  float* states = scratch<RunStates>(call.groups * plan.runs * floats);
  if (states == nullptr) return no_scratch("attention");
  const int status = parallel(call.groups * plan.runs, 1, [&](long begin, long end) {
    for (long task = begin; task < end; task++) {
      float* room = scratch<AttentionPlan>(floats);
      if (room == nullptr) return no_scratch("attention");
      const AttentionState part = state_at(room, queries), run = state_at(states + task * floats, queries);
      run_state(plan, task / plan.runs, 0, call.rows, task % plan.runs, splits, run, part);
    }
    return static_cast<int>(kOk);
  });
  if (status != kOk) return status;
  return parallel(call.groups, call.groups, [&](long begin, long end) {
    for (long group = begin; group < end; group++) {
      float* base = states + group * plan.runs * floats;
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
  const int64_t entries = plan.entries(0, call.rows);
  plan.runs = (entries + kRun * kSplit - 1) / (kRun * kSplit);
  const int64_t tasks = call.groups * plan.row_tasks;
  const bool tiny = call.rows * call.heads * call.width * entries < kProductsOfSlice;
  if (tasks < 2 * pool_threads() && plan.runs > 1) return attend_by_runs(plan);
  return attend_by_rows(plan, tiny ? tasks : 1);
}

// Positions of each row's listed blocks and of its incomplete tail, ascending: `list` is rows x stride.
int expand_blocks(const int32_t* blocks, int64_t top_blocks, int64_t block, int64_t start, int64_t rows, int64_t stride,
                  int32_t* list, int32_t* counts) {
  for (int64_t t = 0; t < rows; t++) {
    const int64_t end = start + t + 1, complete = end / block;
    int32_t* out = list + t * stride;
    int32_t count = 0;
    int64_t before = -1;
    for (int64_t m = 0; m < top_blocks && blocks[t * top_blocks + m] >= 0; m++) {
      const int64_t id = blocks[t * top_blocks + m];
      if (id <= before || id >= complete)
        return fail(kBadArgument, "row %ld lists block %ld behind block %ld of %ld complete ones", long(t), long(id),
                    long(before), long(complete));
      for (int64_t j = 0; j < block; j++) out[count++] = static_cast<int32_t>(id * block + j);
      before = id;
    }
    for (int64_t p = complete * block; p < end; p++) out[count++] = static_cast<int32_t>(p);
    counts[t] = count;
  }
  return kOk;
}

// Leading rows that list all of their complete blocks: they attend everything.
int64_t whole_rows(const int32_t* blocks, int64_t top_blocks, int64_t block, int64_t start, int64_t rows) {
  int64_t t = 0;
  for (; t < rows; t++) {
    const int64_t complete = (start + t + 1) / block;
    if (complete > top_blocks || (complete > 0 && blocks[t * top_blocks + complete - 1] != complete - 1)) break;
  }
  return t;
}

struct ListScratch;

// At most kSlabRows rows, each over its own list.
int attend_listed(AttentionCall& call, const int32_t* blocks, int64_t top_blocks, int64_t block) {
  const int64_t stride = top_blocks * block + block - 1;
  int32_t* counts = scratch<ListScratch, int32_t>(call.rows * (stride + 1));
  if (counts == nullptr) return no_scratch("sparse_attention");
  int32_t* list = counts + call.rows;
  const int status = expand_blocks(blocks, top_blocks, block, call.start, call.rows, stride, list, counts);
  if (status != kOk) return status;
  call.list = list;
  call.list_count = counts;
  call.list_stride = stride;
  return attend_all(call);
}

// A score as a number that sorts: NaN lowest, then by value (scores are never negative).
inline uint32_t rank_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return score != score ? 0 : bits + 1;
}

// The `wanted` ids of `count` scores by (score descending, id ascending), written ascending. Finds the rank of the last
// one by three counting passes (11, 11, 10 bits), then collects in order.
void pick_blocks(const float* scores, int64_t count, int64_t wanted, int32_t* ids) {
  static constexpr int kShift[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
  uint32_t prefix = 0, known = 0;
  int64_t left = wanted;  // still to be found among the ranks that share `prefix`
  for (int pass = 0; pass < 3; pass++) {
    int32_t histogram[2048] = {0};
    const uint32_t mask = (1u << kBits[pass]) - 1;
    for (int64_t i = 0; i < count; i++) {
      const uint32_t rank = rank_of(scores[i]);
      if ((rank & known) == prefix) histogram[(rank >> kShift[pass]) & mask]++;
    }
    uint32_t digit = mask;
    while (histogram[digit] < left) left -= histogram[digit--];
    prefix |= digit << kShift[pass];
    known |= mask << kShift[pass];
  }
  for (int64_t i = 0; i < count; i++) {
    const uint32_t rank = rank_of(scores[i]);
    if (rank > prefix || (rank == prefix && left-- > 0)) *ids++ = static_cast<int32_t>(i);
  }
}

struct SlabScratch;

// Scores and picks of rows [first, first + rows), at most kScoredRows.
int select_slab(const float* q, int64_t rows, int64_t heads, int64_t width, const float* keys, int64_t position,
                int64_t block, int64_t top_blocks, int32_t* ids) {
  const int64_t most = (position + rows) / block, step = kQueries / heads;
  float* scores = scratch<SlabScratch>(rows * most);
  if (scores == nullptr) return no_scratch("select_blocks");
  if (most > top_blocks) {
    const int64_t tall = (rows + step - 1) / step, wide = (most + kSplit - 1) / kSplit;
    const int64_t work = std::min(step, rows) * heads * width * kSplit;
    const int status = parallel(tall * wide, at_least_one(kProductsOfSlice / work), [&](long begin, long end) {
      for (long i = begin; i < end; i++) {
        const int64_t t = i % tall * step, from = i / tall * kSplit;
        table().block_scores(q + t * heads * width, std::min(step, rows - t), heads, width, keys, from,
                             std::min(from + kSplit, most), scores + t * most, most);
      }
    });
    if (status != kOk) return status;
  }
  return parallel(rows, at_least_one(kElementsOfSlice / at_least_one(4 * most)), [&](long begin, long end) {
    for (long t = begin; t < end; t++) {
      const int64_t seen = (position + t + 1) / block, wanted = std::min(seen, top_blocks);
      int32_t* out = ids + t * top_blocks;
      if (seen <= top_blocks)
        for (int64_t i = 0; i < wanted; i++) out[i] = static_cast<int32_t>(i);
      else
        pick_blocks(scores + t * most, seen, wanted, out);
      for (int64_t i = wanted; i < top_blocks; i++) out[i] = -1;
    }
  });
}

}  // namespace
}  // namespace strata

#pragma GCC visibility push(default)
extern "C" {

int strata_rows_attention(const float* q, const void* k, const void* v, int format, int64_t rows, int64_t heads,
                          int64_t groups, int64_t width, int64_t start, float scale, float* o) {
  return strata::attend_all(strata::AttentionCall{q, k, v, o, nullptr, nullptr, 0, rows, heads, groups, width, start,
                                                  format, scale});
}

// Ops.sparse_attention with a list: `blocks` is rows x top_blocks, ascending, padded with -1.
int strata_rows_sparse_attention(const float* q, const void* k, const void* v, int format, int64_t rows, int64_t heads,
                                 int64_t groups, int64_t width, int64_t start, float scale, const int32_t* blocks,
                                 int64_t top_blocks, int64_t block, float* o) {
  using namespace strata;
  if (block < 1) return fail(kBadArgument, "index blocks of %ld tokens", long(block));
  const int64_t whole = whole_rows(blocks, top_blocks, block, start, rows);
  AttentionCall call{q, k, v, o, nullptr, nullptr, 0, whole, heads, groups, width, start, format, scale};
  int status = attend_all(call);
  for (int64_t t = whole; t < rows && status == kOk; t += kSlabRows) {
    call.rows = std::min(kSlabRows, rows - t);
    call.start = start + t;
    call.q = q + t * heads * width;
    call.o = o + t * heads * width;
    status = attend_listed(call, blocks + t * top_blocks, top_blocks, block);
  }
  return status;
}

// Ops.select_blocks.
int strata_rows_select_blocks(const float* q, int64_t rows, int64_t heads, int64_t width, const float* keys,
                              int64_t start, int64_t block, int64_t top_blocks, int32_t* ids) {
  using namespace strata;
  if (heads < 1 || heads > kQueries || block < 1)
    return fail(kBadArgument, "%ld index heads, blocks of %ld: at most %ld heads", long(heads), long(block),
                long(kQueries));
  for (int64_t t = 0; t < rows; t += kScoredRows) {
    const int status = select_slab(q + t * heads * width, std::min(kScoredRows, rows - t), heads, width, keys, start + t,
                                   block, top_blocks, ids + t * top_blocks);
    if (status != kOk) return status;
  }
  return kOk;
}

// Ops.index_block_keys.
int strata_rows_index_block_keys(const float* raw, const float* weight, float eps, const float* cosine,
                                 const float* sine, int64_t blocks, int64_t members, int64_t width, int64_t half,
                                 float* keys) {
  using namespace strata;
  return over_rows(blocks, members * width, [&](long begin, long end) {
    float* out = keys + begin * width;
    table().block_mean(raw + begin * members * width, end - begin, members, width, out);
    table().rms_norm(out, weight, eps, 1, end - begin, width, out);
    table().rope(out, cosine + begin * half, sine + begin * half, end - begin, 1, width, half, out);
  });
}
}
#pragma GCC visibility pop
