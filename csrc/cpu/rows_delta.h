// The gated delta net: causal convolution, its inputs, the recurrence and the gated norm.

constexpr int kConvBlock = 64;  // channels whose taps are turned once and used for all rows

// Channels [first, last) of silu(depthwise convolution): the last tap meets the row itself, taps in rising order, the
// first product alone and then one FMA a tap. y starts with the call's first row and channel `first`.
static void causal_conv(const ConvCall& call, int64_t first, int64_t last, float* y, int64_t y_stride) {
  const int64_t tail_rows = (call.taps - 1) * call.dilation;
  alignas(64) float taps[kMostTaps][kConvBlock];
  for (int64_t block = first; block < last; block += kConvBlock) {
    const int64_t size = last - block < kConvBlock ? last - block : kConvBlock;
    for (int64_t w = 0; w < call.taps; w++)
      for (int64_t c = 0; c < kConvBlock; c++) taps[w][c] = c < size ? call.weight[(block + c) * call.taps + w] : 0.0f;
    for (int64_t t = call.first; t < call.last; t++) {
      const float* rows[kMostTaps];
      for (int64_t w = 0; w < call.taps; w++) {
        const int64_t z = t + w * call.dilation;
        rows[w] = (z < tail_rows ? call.tail + z * call.channels : call.x + (z - tail_rows) * call.channels) + block;
      }
      float* out = y + (t - call.first) * y_stride + (block - first);
      each_lanes(size, [&](int64_t i, int n) {
        Lanes sum = mul(load(taps[0] + i), take(rows[0] + i, n));
        for (int64_t w = 1; w < call.taps; w++) sum = fma(load(taps[w] + i), take(rows[w] + i, n), sum);
        put(out + i, silu(sum), n);
      });
    }
  }
}

// x * rsqrt(sum(x^2) + 1e-6) * factor for vectors of `width`.
static void unit_length(const float* x, float factor, int64_t count, int64_t width, float* y) {
  const Lanes f = broadcast(factor);
  for (int64_t v = 0; v < count; v++, x += width, y += width) {
    const Lanes inverse = broadcast(1.0f / __builtin_sqrtf(dot_row(x, x, width) + 1e-6f));
    each_lanes(width, [&](int64_t i, int n) { put(y + i, mul(mul(take(x + i, n), inverse), f), n); });
  }
}

// beta = sigmoid(b); g = -exp(log_decay) * softplus(a + dt_bias).
static void delta_gates(const float* b, const float* a, const float* log_decay, const float* dt_bias, int64_t rows,
                        int64_t heads, float* beta, float* g) {
  for (int64_t t = 0; t < rows; t++, b += heads, a += heads, beta += heads, g += heads)
    each_lanes(heads, [&](int64_t i, int n) {
      put(beta + i, sigmoid(take(b + i, n)), n);
      const Lanes step = softplus(add(take(a + i, n), take(dt_bias + i, n)));
      put(g + i, neg(mul(exponential(take(log_decay + i, n)), step)), n);
    });
}

// One row on C Lanes of columns of one head's state, held in `state` (D x C Lanes). Sums over D run in two chains, even
// and odd, added at the end: known = decay * (S^T k), delta = (v - known) * beta, S = S * decay + k delta^T, o = S^T q.
template <int C, bool kOutput>
static inline void delta_row(float* state, const float* q, const float* k, const float* v, float beta, float decay,
                             int64_t key_width, int count, float* o) {
  constexpr int64_t kRow = C * kWidth;
  Lanes even[C], odd[C], change[C];
  for (int c = 0; c < C; c++) even[c] = odd[c] = zero();
  int64_t d = 0;
  for (; d + 2 <= key_width; d += 2) {
    const Lanes first = broadcast(k[d]), second = broadcast(k[d + 1]);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      even[c] = fma(first, load(state + d * kRow + c * kWidth), even[c]);
      odd[c] = fma(second, load(state + (d + 1) * kRow + c * kWidth), odd[c]);
    }
  }
  if (d < key_width)
    for (int c = 0; c < C; c++) even[c] = fma(broadcast(k[d]), load(state + d * kRow + c * kWidth), even[c]);
  const Lanes keep_part = broadcast(decay), rate = broadcast(beta);
  for (int c = 0; c < C; c++) {
    const Lanes known = mul(add(even[c], odd[c]), keep_part);
    change[c] = mul(sub(take(v + c * kWidth, count - c * kWidth), known), rate);
    even[c] = odd[c] = zero();
  }
  for (d = 0; d + 2 <= key_width; d += 2)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const Lanes key = broadcast(k[d + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        float* at = state + (d + j) * kRow + c * kWidth;
        const Lanes s = fma(key, change[c], mul(load(at), keep_part));
        store(at, s);
        if (kOutput) {
          const Lanes query = broadcast(q[d + j]);
          if (j == 0)
            even[c] = fma(query, s, even[c]);
          else
            odd[c] = fma(query, s, odd[c]);
        }
      }
    }
  if (d < key_width)
    for (int c = 0; c < C; c++) {
      float* at = state + d * kRow + c * kWidth;
      const Lanes s = fma(broadcast(k[d]), change[c], mul(load(at), keep_part));
      store(at, s);
      if (kOutput) even[c] = fma(broadcast(q[d]), s, even[c]);
    }
  if (kOutput)
    for (int c = 0; c < C; c++) {
      const int n = count - c * kWidth;
      if (n > 0) put(o + c * kWidth, add(even[c], odd[c]), n);
    }
}

constexpr int kDeltaLanes = 4;  // 32 columns x 128 x 4 = 16 KiB of state: half of the first level (AVX2)

static int64_t delta_columns() { return kDeltaLanes * kWidth; }

// Head n, columns [column, column + delta_columns()): folds the pending rows, then runs the rows. `room` holds
// key_width x delta_columns() floats.
static void gated_delta(const DeltaCall& call, int64_t n, int64_t column, float* room) {
  constexpr int64_t kRow = kDeltaLanes * kWidth;
  const int64_t d_width = call.key_width, v_width = call.value_width, heads = call.value_heads;
  const int64_t group = n / (heads / call.key_heads);
  const int count = static_cast<int>(v_width - column < kRow ? v_width - column : kRow);
  float* state = call.state + n * d_width * v_width + column;
  auto copy_out = [&] {
    for (int64_t d = 0; d < d_width; d++)
      for (int c = 0; c < count; c += kWidth) put(state + d * v_width + c, load(room + d * kRow + c), count - c);
  };
  for (int64_t d = 0; d < d_width; d++)
    for (int c = 0; c < kRow; c += kWidth) store(room + d * kRow + c, take(state + d * v_width + c, count - c));
  for (int64_t t = 0; t < call.pending.rows; t++) {
    const int64_t head = t * heads + n;
    delta_row<kDeltaLanes, false>(room, nullptr, call.pending.k + (t * call.key_heads + group) * d_width,
                                  call.pending.v + head * v_width + column, call.pending.beta[head],
                                  call.pending.decay[head], d_width, count, nullptr);
  }
  if (call.pending.rows > 0 && !call.write) copy_out();
  for (int64_t t = 0; t < call.now.rows; t++) {
    const int64_t head = t * heads + n, key = (t * call.key_heads + group) * d_width;
    delta_row<kDeltaLanes, true>(room, call.q + key, call.now.k + key, call.now.v + head * v_width + column,
                                 call.now.beta[head], call.now.decay[head], d_width, count,
                                 call.o + head * v_width + column);
  }
  if (call.write) copy_out();
}

// weight * o * rsqrt(mean(o^2) + eps) * gate(z), for vectors of `width`; `smooth` picks silu over sigmoid.
static void gated_norm(const float* o, const float* z, const float* weight, float eps, int smooth, int64_t count,
                       int64_t width, float* y) {
  for (int64_t v = 0; v < count; v++, o += width, z += width, y += width) {
    const Lanes inverse = broadcast(inverse_norm(o, eps, width));
    each_lanes(width, [&](int64_t i, int n) {
      const Lanes normed = mul(mul(take(o + i, n), inverse), take(weight + i, n));
      const Lanes gate = take(z + i, n);
      put(y + i, mul(normed, smooth ? silu(gate) : sigmoid(gate)), n);
    });
  }
}
