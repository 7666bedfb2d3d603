// y = x W^T. Two paths with the same bits: up to kTileRows rows stream the weights once from memory with everything
// in registers; more rows convert 8 outputs x kPanel columns of weights to FP32 in the first-level cache and run
// register tiles over it, the 16 lanes of each sum waiting in a buffer between panels.
//
// Q8_0: weight * scale is exact in FP32 (8 x 11 significant bits), so a Q8_0 matrix gives the very bits of its
// dequantised FP32 matrix.

constexpr int kPanel = 512;         // columns of a panel: 8 x 512 x 4 = 16 KiB beside 3 rows x 2 KiB
constexpr int kPanelOutputs = 8;
constexpr int kBlockRows = 96;      // rows of a lane buffer: 96 x 8 x 64 = 48 KiB of the second level

static inline int64_t row_of(const WeightRows& w, int64_t o) { return w.index ? w.index[o] : o; }

// One weight row in each format: Lanes at a column, whole or the first `count`.
struct RowF32 {
  const float* p;
  RowF32() = default;
  RowF32(const WeightRows& w, int64_t o) : p(static_cast<const float*>(w.data) + row_of(w, o) * w.stride) {}
  inline void enter(int64_t) {}
  inline Lanes at(int64_t c) const { return load(p + c); }
  inline Lanes some(int64_t c, int count) const { return load_some(p + c, count); }
};

struct RowBf16 {
  const uint16_t* p;
  RowBf16() = default;
  RowBf16(const WeightRows& w, int64_t o) : p(static_cast<const uint16_t*>(w.data) + row_of(w, o) * w.stride) {}
  inline void enter(int64_t) {}
  inline Lanes at(int64_t c) const { return load_bf16(p + c); }
  inline Lanes some(int64_t c, int count) const { return load_bf16_some(p + c, count); }
};

// Rows are stored in whole blocks of 32, so `some` may read a whole Lanes: what lies behind the columns is zero.
struct RowQ8 {
  const int8_t* p;
  const uint16_t* scales;
  Lanes scale;
  RowQ8() = default;
  RowQ8(const WeightRows& w, int64_t o)
      : p(static_cast<const int8_t*>(w.data) + row_of(w, o) * w.stride),
        scales(w.scales + row_of(w, o) * w.scale_stride),
        scale(zero()) {}
  inline void enter(int64_t block) { scale = broadcast(half_to_float(scales[block])); }
  inline Lanes at(int64_t c) const { return mul(load_i8(p + c), scale); }
  inline Lanes some(int64_t c, int count) const { return count > 0 ? at(c) : zero(); }
};

// R rows x N outputs straight from memory.
template <class Row, int R, int N>
static inline void stream_tile(const float* x, int64_t x_stride, const WeightRows& w, int64_t o, float* y,
                               int64_t y_stride) {
  Row rows[N];
  for (int n = 0; n < N; n++) rows[n] = Row(w, o + n);
  Lanes sum[R][N][kParts];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++)
      for (int h = 0; h < kParts; h++) sum[r][n][h] = zero();
  const int64_t whole = w.columns / 32 * 32;
  for (int64_t c = 0; c < whole; c += 32) {
    for (int n = 0; n < N; n++) rows[n].enter(c / 32);
#pragma GCC unroll 32
    for (int h = 0; h < 2 * kParts; h++) {
      Lanes weight[N];
      for (int n = 0; n < N; n++) weight[n] = rows[n].at(c + h * kWidth);
      for (int r = 0; r < R; r++) {
        const Lanes value = load(x + r * x_stride + c + h * kWidth);
        for (int n = 0; n < N; n++) sum[r][n][h % kParts] = fma(value, weight[n], sum[r][n][h % kParts]);
      }
    }
  }
  if (whole < w.columns) {
    for (int n = 0; n < N; n++) rows[n].enter(whole / 32);
    for (int h = 0; h < 2 * kParts; h++) {
      const int64_t c = whole + h * kWidth;
      const int count = static_cast<int>(w.columns - c);
      for (int r = 0; r < R; r++) {
        const Lanes value = load_some(x + r * x_stride + c, count);
        for (int n = 0; n < N; n++)
          sum[r][n][h % kParts] = fma(value, rows[n].some(c, count), sum[r][n][h % kParts]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) y[r * y_stride + o + n] = sum_lanes(sum[r][n]);
}

template <class Row, int R, int N>
static void stream(const float* x, int64_t x_stride, const WeightRows& w, int64_t first, int64_t last, float* y,
                   int64_t y_stride) {
  int64_t o = first;
  for (; o + N <= last; o += N) stream_tile<Row, R, N>(x, x_stride, w, o, y, y_stride);
  for (; o < last; o++) stream_tile<Row, R, 1>(x, x_stride, w, o, y, y_stride);
}

// 8 outputs x `columns` (rounded up to 16) weights from column c as FP32; missing outputs are zero.
template <class Row>
static void fill_panel(const WeightRows& w, int64_t o, int outputs, int64_t c, int64_t columns, float* panel) {
  const int64_t padded = (columns + 15) / 16 * 16;
  for (int n = 0; n < kPanelOutputs; n++, panel += kPanel) {
    if (n >= outputs) {
      for (int64_t i = 0; i < padded; i += kWidth) store(panel + i, zero());
      continue;
    }
    Row row(w, o + n);
    for (int64_t i = 0; i < padded; i += kWidth) {
      if (i % 32 == 0) row.enter((c + i) / 32);
      store(panel + i, i + kWidth <= columns ? row.at(c + i) : row.some(c + i, static_cast<int>(columns - i)));
    }
  }
}

// One register tile over one panel: lanes[r][n] += x[r] * panel[n].
template <int R>
static inline void panel_tile(const float* x, int64_t x_stride, const float* panel, int64_t columns, bool begin,
                              float* lanes) {
  constexpr int N = kTileOutputs;
  Lanes sum[R][N][kParts];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++)
      for (int h = 0; h < kParts; h++)
        sum[r][n][h] = begin ? zero() : load(lanes + (r * kPanelOutputs + n) * 16 + h * kWidth);
  const int64_t whole = columns / 16 * 16;
  for (int64_t c = 0; c < whole; c += 16) {
#pragma GCC unroll 16
    for (int h = 0; h < kParts; h++) {
      Lanes weight[N];
      for (int n = 0; n < N; n++) weight[n] = load(panel + n * kPanel + c + h * kWidth);
      for (int r = 0; r < R; r++) {
        const Lanes value = load(x + r * x_stride + c + h * kWidth);
        for (int n = 0; n < N; n++) sum[r][n][h] = fma(value, weight[n], sum[r][n][h]);
      }
    }
  }
  if (whole < columns) {
    for (int h = 0; h < kParts; h++) {
      const int64_t c = whole + h * kWidth;
      for (int r = 0; r < R; r++) {
        const Lanes value = load_some(x + r * x_stride + c, static_cast<int>(columns - c));
        for (int n = 0; n < N; n++) sum[r][n][h] = fma(value, load(panel + n * kPanel + c), sum[r][n][h]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++)
      for (int h = 0; h < kParts; h++) store(lanes + (r * kPanelOutputs + n) * 16 + h * kWidth, sum[r][n][h]);
}

template <int R>
static void panel_rows(const float* x, int64_t x_stride, const float* panel, int outputs, int64_t columns, bool begin,
                       float* lanes) {
  for (int n = 0; n < outputs; n += kTileOutputs)
    panel_tile<R>(x, x_stride, panel + n * kPanel, columns, begin, lanes + n * 16);
}

// The last rows of a block, fewer than a tile.
template <int R>
static void panel_rest(const float* x, int64_t x_stride, int rows, const float* panel, int outputs, int64_t columns,
                       bool begin, float* lanes) {
  if constexpr (R > 0) {
    if (rows == R)
      panel_rows<R>(x, x_stride, panel, outputs, columns, begin, lanes);
    else
      panel_rest<R - 1>(x, x_stride, rows, panel, outputs, columns, begin, lanes);
  }
}

template <class Row>
static void panels(const float* x, int64_t x_stride, int64_t rows, const WeightRows& w, int64_t first, int64_t last,
                   float* y, int64_t y_stride) {
  alignas(64) float panel[kPanelOutputs * kPanel];
  alignas(64) float lanes[kBlockRows * kPanelOutputs * 16];
  for (int64_t o = first; o < last; o += kPanelOutputs) {
    const int outputs = static_cast<int>(last - o < kPanelOutputs ? last - o : kPanelOutputs);
    for (int64_t block = 0; block < rows; block += kBlockRows) {
      const int64_t count = rows - block < kBlockRows ? rows - block : kBlockRows;
      for (int64_t c = 0; c < w.columns; c += kPanel) {
        const int64_t columns = w.columns - c < kPanel ? w.columns - c : kPanel;
        fill_panel<Row>(w, o, outputs, c, columns, panel);
        const float* from = x + block * x_stride + c;
        int64_t r = 0;
        for (; r + kTileRows <= count; r += kTileRows)
          panel_rows<kTileRows>(from + r * x_stride, x_stride, panel, outputs, columns, c == 0,
                                lanes + r * kPanelOutputs * 16);
        panel_rest<kTileRows - 1>(from + r * x_stride, x_stride, static_cast<int>(count - r), panel, outputs, columns,
                                  c == 0, lanes + r * kPanelOutputs * 16);
      }
      for (int64_t r = 0; r < count; r++)
        for (int n = 0; n < outputs; n++) {
          Lanes sum[kParts];
          for (int h = 0; h < kParts; h++) sum[h] = load(lanes + (r * kPanelOutputs + n) * 16 + h * kWidth);
          y[(block + r) * y_stride + o + n] = sum_lanes(sum);
        }
    }
  }
}

template <class Row>
static void linear_in(const float* x, int64_t x_stride, int64_t rows, const WeightRows& w, int64_t first, int64_t last,
                      float* y, int64_t y_stride) {
  if (rows == 1)
    stream<Row, 1, 4>(x, x_stride, w, first, last, y, y_stride);
  else if (rows == 2)
    stream<Row, 2, 2>(x, x_stride, w, first, last, y, y_stride);
  else if (rows == 3)
    stream<Row, 3, 2>(x, x_stride, w, first, last, y, y_stride);
  else
    panels<Row>(x, x_stride, rows, w, first, last, y, y_stride);
}

static void linear(const float* x, int64_t x_stride, int64_t rows, const WeightRows& w, int64_t first, int64_t last,
                   float* y, int64_t y_stride) {
  if (w.format == kF32)
    linear_in<RowF32>(x, x_stride, rows, w, first, last, y, y_stride);
  else if (w.format == kBf16)
    linear_in<RowBf16>(x, x_stride, rows, w, first, last, y, y_stride);
  else
    linear_in<RowQ8>(x, x_stride, rows, w, first, last, y, y_stride);
}

template <class Row>
static void embedding_in(const int64_t* ids, int64_t rows, const WeightRows& table, float* y) {
  for (int64_t t = 0; t < rows; t++, y += table.columns) {
    Row row(table, ids[t]);
    for (int64_t c = 0; c < table.columns; c += kWidth) {
      if (c % 32 == 0) row.enter(c / 32);
      const int64_t count = table.columns - c;
      if (count >= kWidth)
        store(y + c, row.at(c));
      else
        store_some(y + c, row.some(c, static_cast<int>(count)), static_cast<int>(count));
    }
  }
}

static void embedding(const int64_t* ids, int64_t rows, const WeightRows& table, float* y) {
  if (table.format == kF32)
    embedding_in<RowF32>(ids, rows, table, y);
  else if (table.format == kBf16)
    embedding_in<RowBf16>(ids, rows, table, y);
  else
    embedding_in<RowQ8>(ids, rows, table, y);
}
