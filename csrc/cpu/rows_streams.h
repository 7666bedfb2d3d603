// Hyper-connections and the n-gram gate: S residual streams of H columns a row.

// Norm of each stream with its own weight row; `weight` is S x H, used as 1 + weight.
static void stream_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t streams, int64_t columns,
                        float* y) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t s = 0; s < streams; s++, x += columns, y += columns)
      rms_norm(x, weight + s * columns, eps, 1, 1, columns, y);
}

// silu(x / divisor), in place allowed.
static void silu_divided(const float* x, float divisor, int64_t count, float* y) {
  const Lanes d = broadcast(divisor);
  each_lanes(count, [&](int64_t i, int n) { put(y + i, silu(div(take(x + i, n), d)), n); });
}

// 2 sigmoid(x / divisor), in place allowed.
static void twice_sigmoid(const float* x, float divisor, int64_t count, float* y) {
  const Lanes d = broadcast(divisor);
  each_lanes(count, [&](int64_t i, int n) {
    const Lanes g = sigmoid(div(take(x + i, n), d));
    put(y + i, add(g, g), n);
  });
}

// u = (1 / S) sum over s ascending of sigmoid(mix_s) * n_s.
static void stream_mean(const float* mix, const float* n, int64_t rows, int64_t streams, int64_t columns, float* u) {
  const Lanes part = broadcast(1.0f / static_cast<float>(streams));
  const int64_t row = streams * columns;
  for (int64_t t = 0; t < rows; t++, mix += row, n += row, u += columns)
    each_lanes(columns, [&](int64_t i, int count) {
      Lanes sum = mul(sigmoid(take(mix + i, count)), take(n + i, count));
      for (int64_t s = 1; s < streams; s++) {
        const int64_t at = s * columns + i;
        sum = fma(sigmoid(take(mix + at, count)), take(n + at, count), sum);
      }
      put(u + i, mul(sum, part), count);
    });
}

// x_s + c_s * y.
static void stream_add(const float* x, const float* c, const float* y, int64_t rows, int64_t streams, int64_t columns,
                       float* out) {
  for (int64_t t = 0; t < rows; t++, y += columns)
    for (int64_t s = 0; s < streams; s++, c++, x += columns, out += columns) {
      const Lanes factor = broadcast(*c);
      each_lanes(columns,
                 [&](int64_t i, int n) { put(out + i, fma(factor, take(y + i, n), take(x + i, n)), n); });
    }
}

static inline float inverse_norm(const float* x, float eps, int64_t columns) {
  return 1.0f / __builtin_sqrtf(dot_row(x, x, columns) / static_cast<float>(columns) + eps);
}

// Sum over H of norm(key) * norm(x), each times 1 + its weight, in the 16 lanes.
static inline float match_streams(const float* key, const float* key_weight, const float* x, const float* x_weight,
                                  float eps, int64_t columns) {
  const Lanes one = broadcast(1.0f);
  const Lanes a = broadcast(inverse_norm(key, eps, columns)), b = broadcast(inverse_norm(x, eps, columns));
  Lanes sum[kParts];
  for (int h = 0; h < kParts; h++) sum[h] = zero();
  for (int64_t c = 0; c < columns; c += 16)
    for (int h = 0; h < kParts; h++) {
      const int64_t i = c + h * kWidth;
      const int n = static_cast<int>(columns - i);
      const Lanes left = mul(mul(take(key + i, n), a), add(take(key_weight + i, n), one));
      const Lanes right = mul(mul(take(x + i, n), b), add(take(x_weight + i, n), one));
      sum[h] = fma(left, right, sum[h]);
    }
  return sum_lanes(sum);
}

static void ngram_gate(const NgramCall& call, int64_t first, int64_t last) {
  const int64_t columns = call.columns;
  const float root_of_columns = __builtin_sqrtf(static_cast<float>(columns));
  for (int64_t t = first; t < last; t++)
    for (int64_t s = 0; s < call.streams; s++) {
      const int64_t at = (t * call.streams + s) * columns, w = s * columns;
      float match = match_streams(call.key + at, call.norm_key + w, call.x + at, call.norm_query + w, call.eps, columns);
      match /= root_of_columns;
      const float size = __builtin_fabsf(match);
      const float magnitude = __builtin_sqrtf(size < 1e-6f ? 1e-6f : size);
      match = match > 0.0f ? magnitude : match < 0.0f ? -magnitude : match;  // 0 and NaN stay
      const Lanes gate = sigmoid(broadcast(match));
      const float* value = call.value + t * columns;
      float* gated = call.gated + at;
      each_lanes(columns, [&](int64_t i, int n) { put(gated + i, mul(gate, take(value + i, n)), n); });
      rms_norm(gated, call.norm_conv + w, call.eps, 1, 1, columns, call.normed + at);
    }
}
