// Norms, rope, router, gates, argmax: small operations of a row, each in a fixed order.

// Sum of x * y over `columns` in the 16 lanes.
static inline float dot_row(const float* x, const float* y, int64_t columns) {
  Lanes sum[kParts];
  for (int h = 0; h < kParts; h++) sum[h] = zero();
  int64_t c = 0;
  for (; c + 16 <= columns; c += 16)
    for (int h = 0; h < kParts; h++) sum[h] = fma(load(x + c + h * kWidth), load(y + c + h * kWidth), sum[h]);
  if (c < columns)
    for (int h = 0; h < kParts; h++) {
      const int count = static_cast<int>(columns - c) - h * kWidth;
      sum[h] = fma(load_some(x + c + h * kWidth, count), load_some(y + c + h * kWidth, count), sum[h]);
    }
  return sum_lanes(sum);
}

// The first `count` lanes, zeros behind them.
static inline Lanes keep(Lanes a, int count) {
  if (count >= kWidth) return a;
  float part[kWidth];
  store(part, a);
  return load_some(part, count);
}

static void rms_norm(const float* x, const float* weight, float eps, int plus_one, int64_t rows, int64_t columns,
                     float* y) {
  for (int64_t t = 0; t < rows; t++, x += columns, y += columns) {
    const float mean = dot_row(x, x, columns) / static_cast<float>(columns);
    const Lanes inverse = broadcast(1.0f / __builtin_sqrtf(mean + eps));
    each_lanes(columns, [&](int64_t i, int n) {
      Lanes w = take(weight + i, n);
      if (plus_one) w = add(w, broadcast(1.0f));
      put(y + i, mul(mul(take(x + i, n), inverse), w), n);
    });
  }
}

static void rope(const float* x, const float* cosine, const float* sine, int64_t rows, int64_t heads, int64_t width,
                 int64_t half, float* y) {
  for (int64_t t = 0; t < rows; t++, cosine += half, sine += half)
    for (int64_t n = 0; n < heads; n++, x += width, y += width) {
      each_lanes(half, [&](int64_t i, int count) {
        const Lanes c = take(cosine + i, count), s = take(sine + i, count);
        const Lanes a = take(x + i, count), b = take(x + half + i, count);
        put(y + i, fma(a, c, neg(mul(b, s))), count);
        put(y + half + i, fma(b, c, mul(a, s)), count);
      });
      for (int64_t i = 2 * half; i < width; i++) y[i] = x[i];
    }
}

// Order of the router: logit descending, id ascending, NaN behind everything.
static inline bool before(float a, int32_t i, float b, int32_t j) {
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan || b_nan) return a_nan == b_nan ? i < j : b_nan;
  return a != b ? a > b : i < j;
}

static void router(const float* logits, int64_t rows, int64_t experts, int64_t top_k, int renormalise, int32_t* ids,
                   float* weights) {
  for (int64_t t = 0; t < rows; t++, logits += experts, ids += top_k, weights += top_k) {
    int64_t kept = 0;
    for (int64_t e = 0; e < experts; e++) {
      const int32_t id = static_cast<int32_t>(e);
      if (kept == top_k && !before(logits[e], id, logits[ids[kept - 1]], ids[kept - 1])) continue;
      int64_t at = kept < top_k ? kept++ : kept - 1;
      for (; at > 0 && before(logits[e], id, logits[ids[at - 1]], ids[at - 1]); at--) ids[at] = ids[at - 1];
      ids[at] = id;
    }
    // The first pick is the largest logit (NaN only when all are): the softmax's shift.
    const Lanes shift = broadcast(logits[ids[0]]);
    Lanes sum[kParts];
    for (int h = 0; h < kParts; h++) sum[h] = zero();
    for (int64_t c = 0; c < experts; c += 16)
      for (int h = 0; h < kParts; h++) {
        const int64_t i = c + h * kWidth;
        const int count = static_cast<int>(experts - i);
        sum[h] = add(sum[h], keep(exponential(sub(take(logits + i, count), shift)), count));
      }
    const float total = sum_lanes(sum);
    float picked = 0.0f;
    for (int64_t k = 0; k < top_k; k++) {
      float lane[16];
      store(lane, exponential(sub(broadcast(logits[ids[k]]), shift)));
      weights[k] = lane[0] / total;
      picked += weights[k];
    }
    if (renormalise)
      for (int64_t k = 0; k < top_k; k++) weights[k] /= picked;
  }
}

static void silu_mul(const float* gate, const float* up, int64_t count, float* y) {
  each_lanes(count, [&](int64_t i, int n) { put(y + i, mul(silu(take(gate + i, n)), take(up + i, n)), n); });
}

static void sigmoid_mul(const float* gate, const float* x, int64_t count, float* y) {
  each_lanes(count, [&](int64_t i, int n) { put(y + i, mul(sigmoid(take(gate + i, n)), take(x + i, n)), n); });
}

// One gate a row.
static void sigmoid_scale(const float* gate, const float* x, int64_t rows, int64_t columns, float* y) {
  for (int64_t t = 0; t < rows; t++, x += columns, y += columns) {
    const Lanes g = sigmoid(broadcast(gate[t]));
    each_lanes(columns, [&](int64_t i, int n) { put(y + i, mul(g, take(x + i, n)), n); });
  }
}

static void add_rows(const float* x, const float* y, int64_t count, float* z) {
  each_lanes(count, [&](int64_t i, int n) { put(z + i, add(take(x + i, n), take(y + i, n)), n); });
}

// The largest of up to kArgmaxBlock logits and whether all are numbers; a NaN is never larger.
static inline bool block_maximum(const float* logits, int64_t count, float* maximum) {
  Lanes top[4], sum = zero();
  for (int j = 0; j < 4; j++) top[j] = broadcast(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int j = 0; j < 4; j++) {
      const Lanes x = load(logits + i + j * kWidth);
      top[j] = larger(x, top[j]);
      sum = fma(x, zero(), sum);  // 0 for numbers, NaN for NaN and infinities
    }
  float m[4 * kWidth], s[kWidth];
  for (int j = 0; j < 4; j++) store(m + j * kWidth, top[j]);
  store(s, sum);
  float best = -__builtin_inff();
  for (int j = 0; j < 4 * kWidth; j++) best = m[j] > best ? m[j] : best;
  bool numbers = true;
  for (int j = 0; j < kWidth; j++) numbers &= s[j] == 0.0f;
  if (!numbers) {  // an infinity is a number too
    numbers = true;
    for (int64_t j = 0; j < i; j++) numbers &= logits[j] == logits[j];
  }
  for (; i < count; i++) {
    best = logits[i] > best ? logits[i] : best;
    numbers &= logits[i] == logits[i];
  }
  *maximum = best;
  return numbers;
}

constexpr int64_t kArgmaxBlock = 1024;

// The first block that holds the maximum holds the lowest id.
static void argmax(const float* logits, int64_t rows, int64_t columns, int64_t* ids) {
  for (int64_t t = 0; t < rows; t++, logits += columns) {
    int64_t where = 0;
    float best = 0.0f;
    bool valid = true;
    for (int64_t c = 0; c < columns && valid; c += kArgmaxBlock) {
      float here;
      valid = block_maximum(logits + c, columns - c < kArgmaxBlock ? columns - c : kArgmaxBlock, &here);
      if (c == 0 || here > best) {
        where = c;
        best = here;
      }
    }
    while (valid && logits[where] != best) where++;
    ids[t] = valid ? where : -1;
  }
}

// The bare functions, for tests against float64.
static void function(int which, const float* x, int64_t count, float* y) {
  each_lanes(count, [&](int64_t i, int n) {
    const Lanes a = take(x + i, n);
    put(y + i, which == 0 ? exponential(a) : which == 1 ? sigmoid(a) : which == 2 ? silu(a) : softplus(a), n);
  });
}

// Nothing but independent FMA in registers: what the processor can do, for benchmarks. Returns the multiply-adds.
static int64_t fma_rounds(int64_t rounds, float* y) {
  constexpr int kChains = 12;
  Lanes sum[kChains];
  const Lanes a = broadcast(y[0]), b = broadcast(y[1]);
#pragma GCC unroll 12
  for (int i = 0; i < kChains; i++) sum[i] = broadcast(y[1] + static_cast<float>(i));
  for (int64_t k = 0; k < rounds; k++)
#pragma GCC unroll 12
    for (int i = 0; i < kChains; i++) sum[i] = fma(sum[i], a, b);
#pragma GCC unroll 12
  for (int i = 1; i < kChains; i++) sum[0] = add(sum[0], sum[i]);
  float lanes[kWidth];
  store(lanes, sum[0]);
  y[2] = lanes[0];
  return rounds * kChains * kWidth;
}
