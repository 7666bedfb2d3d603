// The index of sparse attention: keys of blocks and scores of blocks.

// Mean over the J rows of each block, in rising order.
static void block_mean(const float* raw, int64_t blocks, int64_t members, int64_t width, float* y) {
  const Lanes divisor = broadcast(static_cast<float>(members));
  for (int64_t b = 0; b < blocks; b++, raw += members * width, y += width)
    each_lanes(width, [&](int64_t i, int n) {
      Lanes sum = take(raw + i, n);
      for (int64_t j = 1; j < members; j++) sum = add(sum, take(raw + j * width + i, n));
      put(y + i, div(sum, divisor), n);
    });
}

// Scores of blocks [first, last) for `rows` rows (rows * heads <= kQueries): the sum over heads, ascending, of
// relu(q . key). A NaN stays. y's row t starts at y + t * y_stride and is indexed by block.
static void block_scores(const float* q, int64_t rows, int64_t heads, int64_t width, const float* keys, int64_t first,
                         int64_t last, float* y, int64_t y_stride) {
  alignas(64) float scores[kQueries * kSplit];
  for (int64_t block = first; block < last; block += kSplit) {
    const int64_t count = last - block < kSplit ? last - block : kSplit;
    const WeightRows k{kF32, keys + block * width, nullptr, width, width, 0, nullptr};
    linear(q, width, rows * heads, k, 0, count, scores, kSplit);
    for (int64_t t = 0; t < rows; t++)
      each_lanes(count, [&](int64_t i, int n) {
        Lanes sum = zero();
        for (int64_t h = 0; h < heads; h++)
          sum = add(sum, larger(zero(), load(scores + (t * heads + h) * kSplit + i)));
        put(y + t * y_stride + block + i, sum, n);
      });
  }
}
