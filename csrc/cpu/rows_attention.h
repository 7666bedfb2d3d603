// Attention of a block of query rows over a cache, in splits of 256 list entries.
//
// A split gives for each query its largest score m, l = sum of e^(s - m) (16 lanes, lane = entry mod 16) and
// o = sum of e^(s - m) v, entry by entry with FMA. Splits are folded in order into a running state. Split s always
// holds entries 256 s ... 256 s + 255 of the row's list, so chunking changes nothing.

// How many entries of `split` row t sees.
static inline int64_t seen(const AttentionCall& call, int64_t t, int64_t split) {
  const int64_t all = call.list ? call.list_count[t] : call.start + t + 1;
  const int64_t here = all - split * kSplit;
  return here < 0 ? 0 : (here < kSplit ? here : kSplit);
}

constexpr int64_t kAhead = 16;  // positions between a value row that is used and the one that memory is asked for

// o[r] (R queries x C Lanes from column `d`) += weights over entries [begin, end). `Whole`: all C Lanes lie in the width.
template <class Row, int R, int C, bool Whole>
static inline void value_tile(const float* weights, const WeightRows& v, int64_t begin, int64_t end, int64_t d,
                              int64_t width, float* o) {
  Lanes sum[R][C];
  int counts[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) {
    counts[c] = Whole ? kWidth : static_cast<int>(width - d) - c * kWidth;
    for (int r = 0; r < R; r++) sum[r][c] = take(o + r * width + d + c * kWidth, counts[c]);
  }
  for (int64_t p = begin; p < end; p++) {
    const Row row(v, p);
    if (p + kAhead < end) Row(v, p + kAhead).fetch(d);
    Lanes e[R];
    for (int r = 0; r < R; r++) e[r] = broadcast(weights[r * kSplit + p]);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      const int64_t at = d + c * kWidth;
      const Lanes value = Whole ? row.at(at) : row.some(at, counts[c]);
      for (int r = 0; r < R; r++) sum[r][c] = fma(e[r], value, sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) put(o + r * width + d + c * kWidth, sum[r][c], counts[c]);
}

template <class Row, int R>
static inline void value_stripe(const float* weights, const WeightRows& v, int64_t begin, int64_t end, int64_t d,
                                int64_t width, float* o) {
  if (begin >= end) return;
  if (d + kValueTile * kWidth <= width)
    value_tile<Row, R, kValueTile, true>(weights, v, begin, end, d, width, o);
  else
    value_tile<Row, R, kValueTile, false>(weights, v, begin, end, d, width, o);
}

// Adds the values of `queries` queries; counts[q] entries each. A stripe of columns is read from memory once and stays in
// the first level for all queries; what all of a tile see is computed together, the rest query by query.
template <class Row>
static void values(const float* weights, const WeightRows& v, const int64_t* counts, int64_t queries, int64_t width,
                   float* o) {
  constexpr int R = 3;
  for (int64_t d = 0; d < width; d += kValueTile * kWidth) {
    int64_t q = 0;
    for (; q + R <= queries; q += R) {
      int64_t common = counts[q];
      for (int r = 1; r < R; r++) common = counts[q + r] < common ? counts[q + r] : common;
      const float* e = weights + q * kSplit;
      value_stripe<Row, R>(e, v, 0, common, d, width, o + q * width);
      for (int r = 0; r < R; r++)
        value_stripe<Row, 1>(e + r * kSplit, v, common, counts[q + r], d, width, o + (q + r) * width);
    }
    for (; q < queries; q++) value_stripe<Row, 1>(weights + q * kSplit, v, 0, counts[q], d, width, o + q * width);
  }
}

// Scores to weights in place: returns the maximum and the sum of one query.
static inline void soften(float* scores, int64_t count, float scale, float* maximum, float* sum) {
  const Lanes factor = broadcast(scale);
  Lanes top = broadcast(-__builtin_inff());
  for (int64_t p = 0; p < kSplit; p += kWidth) {
    const int n = static_cast<int>(count - p);
    if (n <= 0) break;
    const Lanes s = mul(take(scores + p, n), factor);
    store(scores + p, s);  // the buffer holds whole splits
    if (n >= kWidth)
      top = larger(s, top);
    else
      for (int i = 0; i < n; i++) top = larger(broadcast(scores[p + i]), top);
  }
  float lanes[kWidth];
  store(lanes, top);
  float m = lanes[0];
  for (int i = 1; i < kWidth; i++) m = lanes[i] > m ? lanes[i] : m;
  const Lanes shift = broadcast(m);
  Lanes total[kParts];
  for (int h = 0; h < kParts; h++) total[h] = zero();
  for (int64_t p = 0; p < count; p += 16)
    for (int h = 0; h < kParts; h++) {
      const int64_t i = p + h * kWidth;
      const Lanes e = keep(exponential(sub(load(scores + i), shift)), static_cast<int>(count - i));
      store(scores + i, e);
      total[h] = add(total[h], e);
    }
  *maximum = m;
  *sum = sum_lanes(total);
}

static inline WeightRows cache_rows(const AttentionCall& call, const void* base, int64_t group, int64_t first,
                                    const int32_t* list) {
  const int64_t stride = call.groups * call.width;
  const int64_t element = group * call.width + (list ? 0 : first * stride);
  const int64_t size = call.format == kF32 ? 4 : 2;
  return WeightRows{call.format, static_cast<const char*>(base) + element * size, nullptr, call.width, stride, 0, list};
}

// One pass: `rows` rows from t, all heads of `group`, against one split whose entries they share.
static void attend(const AttentionCall& call, int64_t group, int64_t t, int64_t rows, int64_t split,
                   const AttentionState& state) {
  const int64_t share = call.heads / call.groups, queries = rows * share;
  alignas(64) float scores[kQueries * kSplit];
  int64_t counts[kQueries];
  int64_t most = 0;
  for (int64_t i = 0; i < queries; i++) {
    counts[i] = seen(call, t + i / share, split);
    most = counts[i] > most ? counts[i] : most;
  }
  const int32_t* list = call.list ? call.list + t * call.list_stride + split * kSplit : nullptr;
  const WeightRows k = cache_rows(call, call.k, group, split * kSplit, list);
  const WeightRows v = cache_rows(call, call.v, group, split * kSplit, list);
  const float* q = call.q + (t * call.heads + group * share) * call.width;
  if (rows == 1) {
    linear(q, call.width, share, k, 0, most, scores, kSplit);
  } else {  // side by side, so that a key is read once for all
    alignas(64) float gathered[kQueries * kMostWidth];
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < share * call.width; i++)
        gathered[r * share * call.width + i] = q[r * call.heads * call.width + i];
    linear(gathered, call.width, queries, k, 0, most, scores, kSplit);
  }
  for (int64_t i = 0; i < queries; i++) {
    if (counts[i] == 0) {
      state.maximum[i] = -__builtin_inff();
      state.sum[i] = 0.0f;
    } else {
      soften(scores + i * kSplit, counts[i], call.scale, state.maximum + i, state.sum + i);
    }
    for (int64_t d = 0; d < call.width; d++) state.values[i * call.width + d] = 0.0f;
  }
  if (call.format == kF32)
    values<RowF32>(scores, v, counts, queries, call.width, state.values);
  else
    values<RowBf16>(scores, v, counts, queries, call.width, state.values);
}

// The state of rows [first, last) x the heads of `group`, row by row, over one split alone.
static void attention_split(const AttentionCall& call, int64_t group, int64_t first, int64_t last, int64_t split,
                            const AttentionState& state) {
  const int64_t share = call.heads / call.groups;
  int64_t step = call.list ? 1 : kQueries / share;
  if (step < 1) step = 1;
  for (int64_t t = first; t < last; t += step) {
    const int64_t at = (t - first) * share;
    const AttentionState here{state.maximum + at, state.sum + at, state.values + at * call.width};
    attend(call, group, t, last - t < step ? last - t : step, split, here);
  }
}

// running <- running and next, which lies behind it. An empty side (sum 0, maximum -inf) leaves the other as it is.
static void attention_fold(const AttentionState& running, const AttentionState& next, int64_t queries,
                           int64_t width) {
  for (int64_t q = 0; q < queries; q++) {
    const float a = running.maximum[q], b = next.maximum[q];
    if (next.sum[q] == 0.0f) continue;
    float* o = running.values + q * width;
    const float* n = next.values + q * width;
    if (running.sum[q] == 0.0f) {
      running.maximum[q] = b;
      running.sum[q] = next.sum[q];
      for (int64_t d = 0; d < width; d++) o[d] = n[d];
      continue;
    }
    const float m = a > b ? a : b;
    const Lanes keep_old = exponential(broadcast(a - m)), keep_new = exponential(broadcast(b - m));
    float old_factor[kWidth], new_factor[kWidth];
    store(old_factor, keep_old);
    store(new_factor, keep_new);
    running.maximum[q] = m;
    running.sum[q] = __builtin_fmaf(running.sum[q], old_factor[0], next.sum[q] * new_factor[0]);
    each_lanes(width, [&](int64_t d, int count) {
      put(o + d, fma(take(o + d, count), keep_old, mul(take(n + d, count), keep_new)), count);
    });
  }
}

// o = values / sum.
static void attention_finish(const AttentionCall& call, int64_t group, int64_t first, int64_t last,
                             const AttentionState& state) {
  const int64_t share = call.heads / call.groups;
  for (int64_t t = first; t < last; t++)
    for (int64_t n = 0; n < share; n++) {
      const int64_t q = (t - first) * share + n;
      float* o = call.o + (t * call.heads + group * share + n) * call.width;
      const float* from = state.values + q * call.width;
      const Lanes sum = broadcast(state.sum[q]);
      each_lanes(call.width, [&](int64_t d, int count) { put(o + d, div(take(from + d, count), sum), count); });
    }
}
