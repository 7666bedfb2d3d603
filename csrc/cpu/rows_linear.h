// y = x W^T. The columns are cut into panels of kPanel; each panel is summed in the 16 lanes and their tree, and panels are
// added in order. Two paths with the same bits: up to 5 rows stream the weights once from memory with everything in
// registers; more rows convert 8 outputs of a panel to FP32 in the first-level cache and run register tiles over it, so
// that nothing but y waits between panels. Streams read plain rows; packed rows (rows.h) are read by panels alone, however
// few of them a block has: the two ways to lay out x are two functions, so that none can be taken for the other (0110).
// Q8_0 matrices have a product of their own (rows_q8.h); as a table of an embedding their weights are int8 * scale, which is
// exact in FP32 (8 x 11 significant bits).

constexpr int kPanelStride = kPanel + 16;  // rows of a panel do not fall on the same cache sets
constexpr int kPanelOutputs = 8;           // 8 x 512 x 4 = 16 KiB beside 3 rows x 2 KiB

// How far ahead in bytes a product with few rows asks memory.
constexpr int64_t kStreamAhead = 1024;

static inline int64_t row_of(const WeightRows& w, int64_t o) { return w.index ? w.index[o] : o; }

// One weight row in each format: `enter` a block of 32 columns, Lanes at a column, whole or the first `count`; `fetch`
// asks memory for a block. kOutputs is how many rows stream side by side for one row of x: more need registers that the
// format's conversion has not left.
struct RowF32 {
  static constexpr int kOutputs = 4;
  const float* p;
  RowF32() = default;
  RowF32(const WeightRows& w, int64_t o) : p(static_cast<const float*>(w.data) + row_of(w, o) * w.stride) {}
  inline void enter(int64_t) {}
  inline void fetch(int64_t c) const {
    __builtin_prefetch(p + c, 0, 2);
    __builtin_prefetch(p + c + 16, 0, 2);
  }
  inline Lanes at(int64_t c) const { return load(p + c); }
  inline Lanes some(int64_t c, int count) const { return load_some(p + c, count); }
};

struct RowBf16 {
  static constexpr int kOutputs = 4;
  const uint16_t* p;
  RowBf16() = default;
  RowBf16(const WeightRows& w, int64_t o) : p(static_cast<const uint16_t*>(w.data) + row_of(w, o) * w.stride) {}
  inline void enter(int64_t) {}
  inline void fetch(int64_t c) const { __builtin_prefetch(p + c, 0, 2); }
  inline Lanes at(int64_t c) const { return load_bf16(p + c); }
  inline Lanes some(int64_t c, int count) const { return load_bf16_some(p + c, count); }
};

// Rows are stored in whole blocks of 32, so `some` may read a whole Lanes: what lies behind the columns is zero.
struct RowQ8 {
  static constexpr int kOutputs = 3;
  const int8_t* p;
  const uint16_t* scales;
  Lanes scale;
  RowQ8() = default;
  RowQ8(const WeightRows& w, int64_t o)
      : p(static_cast<const int8_t*>(w.data) + row_of(w, o) * w.stride),
        scales(w.scales + row_of(w, o) * w.scale_stride),
        scale(zero()) {}
  inline void enter(int64_t block) { scale = broadcast_half(scales + block); }
  inline void fetch(int64_t c) const { __builtin_prefetch(p + c, 0, 2); }
  inline Lanes at(int64_t c) const { return mul(load_i8(p + c), scale); }
  inline Lanes some(int64_t c, int count) const { return count > 0 ? at(c) : zero(); }
};

// y[n * step] of one row, n < N: the trees over `sum`, written (the first panel) or added.
template <int N>
static inline void write_sums(const Lanes (*sum)[kParts], bool begin, int limit, float* y, int64_t step = 1) {
  float tree[N];
  if constexpr (N == 4)
    sum_lanes_of_4(sum, tree);
  else
    for (int n = 0; n < N; n++) tree[n] = sum_lanes(sum[n]);
  if (limit < N) {
    for (int n = 0; n < limit; n++) y[n] = begin ? tree[n] : y[n] + tree[n];
  } else if (begin) {
    for (int n = 0; n < N; n++) y[n * step] = tree[n];
  } else {
    for (int n = 0; n < N; n++) y[n * step] += tree[n];
  }
}

// R rows x N outputs, `step` rows of weights apart, straight from memory, which is asked for `ahead` elements further on.
template <class Row, int R, int N>
static inline void stream_tile(const float* x, int64_t x_stride, const WeightRows& w, int64_t o, int64_t step,
                               int64_t ahead, float* y, int64_t y_stride) {
  Row rows[N];
  for (int n = 0; n < N; n++) rows[n] = Row(w, o + n * step);
  for (int64_t panel = 0; panel < w.columns; panel += kPanel) {
    const int64_t end = w.columns - panel < kPanel ? w.columns : panel + kPanel;
    const int64_t whole = panel + (end - panel) / 32 * 32;
    Lanes sum[R][N][kParts];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++)
        for (int h = 0; h < kParts; h++) sum[r][n][h] = zero();
    for (int64_t c = panel; c < whole; c += 32) {
      for (int n = 0; n < N; n++) {
        rows[n].enter(c / 32);
        rows[n].fetch(c + ahead);
      }
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
    if (whole < end) {
      for (int n = 0; n < N; n++) rows[n].enter(whole / 32);
#pragma GCC unroll 32
      for (int h = 0; h < 2 * kParts; h++) {
        const int64_t c = whole + h * kWidth;
        const int count = static_cast<int>(end - c);
        if (h >= kParts && end - whole <= 16) break;  // lanes are padded to 16 columns, not to 32
        for (int r = 0; r < R; r++) {
          const Lanes value = load_some(x + r * x_stride + c, count);
          for (int n = 0; n < N; n++)
            sum[r][n][h % kParts] = fma(value, rows[n].some(c, count), sum[r][n][h % kParts]);
        }
      }
    }
    for (int r = 0; r < R; r++) write_sums<N>(sum[r], panel == 0, N, y + r * y_stride + o, step);
  }
}

// The processor's prefetch follows long runs of memory and starts anew at each gap. So outputs of one tile are far apart:
// N runs that go on from row to row. Rows with gaps between them, or gathered ones, are taken side by side instead, and the
// row that comes N further on is asked for.
template <class Row, int R, int N>
static void stream(const float* x, int64_t x_stride, const WeightRows& w, int64_t first, int64_t last, float* y,
                   int64_t y_stride) {
  const bool runs = w.index == nullptr && w.stride < w.columns + 32;
  const int64_t tiles = (last - first) / N, step = runs ? tiles : 1, next = runs ? 1 : N;
  const int64_t ahead = runs ? kStreamAhead / static_cast<int64_t>(sizeof(*Row::p)) : N * w.stride;
  for (int64_t i = 0; i < tiles; i++)
    stream_tile<Row, R, N>(x, x_stride, w, first + i * next, step, ahead, y, y_stride);
  for (int64_t o = first + N * tiles; o < last; o++) stream_tile<Row, R, 1>(x, x_stride, w, o, 1, ahead, y, y_stride);
}

// R rows x N outputs over one panel, one Lanes of the 16 lanes after the other, so that weights are converted once and
// sums stay in registers. `ahead` is how far on in each weight row memory is asked for the panel that comes next.
template <class Row, int R, int N>
static inline void stream_panel(const float* x, int64_t x_stride, const WeightRows& w, int64_t o, int64_t panel,
                                int64_t ahead, float* y, int64_t y_stride) {
  const int64_t end = w.columns - panel < kPanel ? w.columns : panel + kPanel;
  const int64_t whole = panel + (end - panel) / 32 * 32;
  Lanes sum[R][N][kParts];
  for (int h = 0; h < kParts; h++) {
    Row rows[N];
    for (int n = 0; n < N; n++) rows[n] = Row(w, o + n);
    Lanes part[R][N];
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) part[r][n] = zero();
    for (int64_t c = panel; c < whole; c += 32) {
      for (int n = 0; n < N; n++) {
        rows[n].enter(c / 32);
        if (h == 0) rows[n].fetch(c + ahead);
      }
#pragma GCC unroll 2
      for (int64_t at = c + h * kWidth; at < c + 32; at += 16) {
        Lanes weight[N];
        for (int n = 0; n < N; n++) weight[n] = rows[n].at(at);
        for (int r = 0; r < R; r++) {
          Lanes value = load(x + r * x_stride + at);
          hold(value);
          for (int n = 0; n < N; n++) part[r][n] = fma(value, weight[n], part[r][n]);
        }
      }
    }
    if (whole < end) {
      for (int n = 0; n < N; n++) rows[n].enter(whole / 32);
      for (int64_t at = whole; at < end; at += 16) {
        const int count = static_cast<int>(end - at) - h * kWidth;
        for (int r = 0; r < R; r++) {
          const Lanes value = load_some(x + r * x_stride + at + h * kWidth, count);
          for (int n = 0; n < N; n++) part[r][n] = fma(value, rows[n].some(at + h * kWidth, count), part[r][n]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int n = 0; n < N; n++) sum[r][n][h] = part[r][n];
  }
  for (int r = 0; r < R; r++) write_sums<N>(sum[r], panel == 0, N, y + r * y_stride + o);
}

// 4 or 5 rows of x: panel by panel, so that x stays in the first level (BF16 from 6.6 to 9.2 GB/s, Q8_0 from 4.1 to 5).
template <class Row, int R>
static void stream_few(const float* x, int64_t x_stride, const WeightRows& w, int64_t first, int64_t last, float* y,
                       int64_t y_stride) {
  constexpr int N = 2;
  for (int64_t panel = 0; panel < w.columns; panel += kPanel) {
    int64_t o = first;
    for (; o + N <= last; o += N) {
      const int64_t ahead = o + 2 * N <= last ? N * w.stride : (first - o) * w.stride + kPanel;
      stream_panel<Row, R, N>(x, x_stride, w, o, panel, ahead, y, y_stride);
    }
    for (; o < last; o++) stream_panel<Row, R, 1>(x, x_stride, w, o, panel, 0, y, y_stride);
  }
}

// 8 outputs x `columns` (rounded up to 16) weights from column c as FP32; missing outputs are zero. Asks memory for the
// panel that is filled next, outputs from `next_o` and columns from `next_c`.
template <class Row>
static void fill_panel(const WeightRows& w, int64_t o, int outputs, int64_t c, int64_t columns, int64_t next_o,
                       int64_t next_c, float* panel) {
  const int64_t padded = (columns + 15) / 16 * 16;
  for (int n = 0; n < kPanelOutputs; n++, panel += kPanelStride) {
    if (n >= outputs) {
      for (int64_t i = 0; i < padded; i += kWidth) store(panel + i, zero());
      continue;
    }
    Row row(w, o + n);
    const Row next(w, next_o + n);
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32) {
      row.enter((c + i) / 32);
      next.fetch(next_c + i);
#pragma GCC unroll 32
      for (int h = 0; h < 2 * kParts; h++) store(panel + i + h * kWidth, row.at(c + i + h * kWidth));
    }
    if (i < columns) row.enter((c + i) / 32);
    for (; i < padded; i += kWidth) store(panel + i, row.some(c + i, static_cast<int>(columns - i)));
  }
}

// One Lanes of the 16 lanes of a register tile over one panel: sum[r][n] = x[r] * panel[n].
template <int R>
static inline void tile_part(const float* x, int64_t x_stride, const float* panel, int64_t columns, int part,
                             Lanes (*sum)[kTileOutputs]) {
  constexpr int N = kTileOutputs;
  const int64_t whole = columns / 16 * 16;
  x += part * kWidth;
  panel += part * kWidth;
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sum[r][n] = zero();
  for (int64_t c = 0; c < whole; c += 16) {
    Lanes value[R];
    for (int r = 0; r < R; r++) {
      value[r] = load(x + r * x_stride + c);
      hold(value[r]);
    }
    for (int n = 0; n < N; n++) {
      Lanes weight = load(panel + n * kPanelStride + c);
      hold(weight);
      for (int r = 0; r < R; r++) sum[r][n] = fma(value[r], weight, sum[r][n]);
    }
  }
  if (whole < columns) {
    const int count = static_cast<int>(columns - whole) - part * kWidth;
    for (int r = 0; r < R; r++) {
      const Lanes value = load_some(x + r * x_stride + whole, count);
      for (int n = 0; n < N; n++) sum[r][n] = fma(value, load(panel + n * kPanelStride + whole), sum[r][n]);
    }
  }
}

// R rows x kTileOutputs outputs over one panel; `limit` outputs are written.
template <int R>
static inline void panel_tile(const float* x, int64_t x_stride, const float* panel, int64_t columns, bool begin,
                              int limit, float* y, int64_t y_stride) {
  Lanes sum[R][kTileOutputs][kParts];
  for (int h = 0; h < kParts; h++) {
    Lanes part[R][kTileOutputs];
    tile_part<R>(x, x_stride, panel, columns, h, part);
    for (int r = 0; r < R; r++)
      for (int n = 0; n < kTileOutputs; n++) sum[r][n][h] = part[r][n];
  }
  for (int r = 0; r < R; r++) write_sums<kTileOutputs>(sum[r], begin, limit, y + r * y_stride);
}

template <int R>
static void panel_rows(const float* x, int64_t x_stride, const float* panel, int outputs, int64_t columns, bool begin,
                       float* y, int64_t y_stride) {
  for (int n = 0; n < outputs; n += kTileOutputs)
    panel_tile<R>(x, x_stride, panel + n * kPanelStride, columns, begin, outputs - n, y + n, y_stride);
}

// The last rows of a block, fewer than a tile.
template <int R>
static void panel_rest(const float* x, int64_t x_stride, int rows, const float* panel, int outputs, int64_t columns,
                       bool begin, float* y, int64_t y_stride) {
  if constexpr (R > 0) {
    if (rows == R)
      panel_rows<R>(x, x_stride, panel, outputs, columns, begin, y, y_stride);
    else
      panel_rest<R - 1>(x, x_stride, rows, panel, outputs, columns, begin, y, y_stride);
  }
}

// Rows of x cut into panels (rows.h, packed_block), from row block `first` to `last`; columns are padded with zeros.
static void pack_rows(const float* x, int64_t rows, int64_t columns, int64_t first, int64_t last, float* packed) {
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  packed += first * packed_block(columns);
  for (int64_t block = first; block < last; block++) {
    const int64_t count = rows - block * kBlockRows < kBlockRows ? rows - block * kBlockRows : kBlockRows;
    for (int64_t p = 0; p < panels; p++, packed += kPackedPanel) {
      const int64_t c = p * kPanel, here = columns - c < kPanel ? columns - c : kPanel;
      for (int64_t r = 0; r < count; r++) {
        const float* from = x + (block * kBlockRows + r) * columns + c;
        float* to = packed + r * kPackedRow;
        for (int64_t i = 0; i < here; i += kWidth) store(to + i, take(from + i, static_cast<int>(here - i)));
      }
    }
  }
}

// Where row r has its panel p: x + p * panel + r * row.
struct PanelRows {
  const float* x;
  int64_t row, panel;
};

// Outputs [first, last) of one block of rows.
template <class Row>
static void panels(const PanelRows& x, int64_t rows, const WeightRows& w, int64_t first, int64_t last, float* y,
                   int64_t y_stride) {
  alignas(64) float panel[kPanelOutputs * kPanelStride];
  const float* of_panel = x.x;
  for (int64_t c = 0; c < w.columns; c += kPanel, of_panel += x.panel) {
    const int64_t columns = w.columns - c < kPanel ? w.columns - c : kPanel;
    for (int64_t o = first; o < last; o += kPanelOutputs) {
      const int outputs = static_cast<int>(last - o < kPanelOutputs ? last - o : kPanelOutputs);
      const bool more = o + 2 * kPanelOutputs <= last;  // else the next panel of the first outputs
      fill_panel<Row>(w, o, outputs, c, columns, more ? o + kPanelOutputs : first, more ? c : c + kPanel, panel);
      int64_t r = 0;
      for (; r + kTileRows <= rows; r += kTileRows)
        panel_rows<kTileRows>(of_panel + r * x.row, x.row, panel, outputs, columns, c == 0, y + r * y_stride + o,
                              y_stride);
      panel_rest<kTileRows - 1>(of_panel + r * x.row, x.row, static_cast<int>(rows - r), panel, outputs, columns, c == 0,
                                y + r * y_stride + o, y_stride);
    }
  }
}

template <class Row>
static void linear_plain(const float* x, int64_t x_stride, int64_t rows, const WeightRows& w, int64_t first,
                         int64_t last, float* y, int64_t y_stride) {
  if (rows == 1) return stream<Row, 1, Row::kOutputs>(x, x_stride, w, first, last, y, y_stride);
  if (rows == 2) return stream<Row, 2, 2>(x, x_stride, w, first, last, y, y_stride);
  if (rows == 3) return stream<Row, 3, 2>(x, x_stride, w, first, last, y, y_stride);
  if (rows == 4) return stream_few<Row, 4>(x, x_stride, w, first, last, y, y_stride);
  if (rows == 5) return stream_few<Row, 5>(x, x_stride, w, first, last, y, y_stride);
  for (int64_t t = 0; t < rows; t += kBlockRows) {
    const int64_t count = rows - t < kBlockRows ? rows - t : kBlockRows;
    panels<Row>(PanelRows{x + t * x_stride, x_stride, kPanel}, count, w, first, last, y + t * y_stride, y_stride);
  }
}

// Rows as they lie, `x_stride` floats apart.
static void linear(const float* x, int64_t x_stride, int64_t rows, const WeightRows& w, int64_t first, int64_t last,
                   float* y, int64_t y_stride) {
  if (w.format == kF32)
    linear_plain<RowF32>(x, x_stride, rows, w, first, last, y, y_stride);
  else
    linear_plain<RowBf16>(x, x_stride, rows, w, first, last, y, y_stride);
}

// One block that pack_rows made, of at most kBlockRows rows.
static void linear_packed(const float* packed, int64_t rows, const WeightRows& w, int64_t first, int64_t last, float* y,
                          int64_t y_stride) {
  const PanelRows x{packed, kPackedRow, kPackedPanel};
  if (w.format == kF32)
    panels<RowF32>(x, rows, w, first, last, y, y_stride);
  else
    panels<RowBf16>(x, rows, w, first, last, y, y_stride);
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
