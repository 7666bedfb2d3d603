// y = x W^T for Q8_0 weights: exact integer products of 16-bit activations, FP32 sums of a fixed order.
//
// x: every 32 columns of a row become codes of 16 bits and a unit, a power of two: with 2^e <= largest magnitude < 2^(e + 1)
// the unit is 2^(e - 14), and a code is x / unit rounded to the nearest even, at most 32,767. e is at least -100. A block
// that holds a NaN or anything from 2^96 on has the unit NaN, which makes all of its row's results NaN.
//
// A block of 32 columns has 8 sums of four products each, sum i = columns 2i, 2i + 1, 16 + 2i, 17 + 2i: what widening to 16
// bits and a multiply-add of pairs give. Four products are at most 2^24, so they are exact as integers in any order and as
// FP32. Each goes to lane 8 * (block mod 2) + i by one FMA with weight scale * unit (exact: the unit is a power of two), in
// the order of blocks. From there on all is as in rows_linear.h: the tree for every kPanel columns, panels in order.

constexpr int64_t kQ8Panel = 1024;  // columns of a sum: part of the result
constexpr int kQ8Blocks = kQ8Panel / 32;
constexpr int kQ8Group = 8;  // outputs that a tile of rows passes by before the next tile: 8 KiB of codes beside 8 KiB of x
// How far ahead in its row a product with few rows asks memory: the processor's prefetch is lost at the end of a page.
constexpr int64_t kQ8Ahead = 1024;
constexpr int64_t kQ8Near = 131072;  // weights that stay in the second level for the rows behind the first four

// A block of 32 columns.
static inline void encode_block(const float* x, int16_t* codes, float* unit) {
  Lanes top_lanes = zero(), odd_lanes = zero();
  for (int i = 0; i < 32; i += kWidth) {
    const Lanes value = load(x + i);
    top_lanes = larger(absolute(value), top_lanes);
    odd_lanes = fma(value, zero(), odd_lanes);  // 0 for numbers, NaN for NaN and infinities
  }
  float tops[kWidth], odds[kWidth], largest = 0.0f, odd = 0.0f;
  store(tops, top_lanes);
  store(odds, odd_lanes);
  for (int i = 0; i < kWidth; i++) {
    largest = tops[i] > largest ? tops[i] : largest;
    odd += odds[i];
  }
  if (odd != 0.0f || largest >= 0x1p96f) {
    const uint32_t nan = 0x7FC00000;
    __builtin_memcpy(unit, &nan, 4);
    for (int i = 0; i < 32; i++) codes[i] = 0;
    return;
  }
  uint32_t exponent;  // 127 more than e
  __builtin_memcpy(&exponent, &largest, 4);
  exponent >>= 23;
  exponent = exponent < 127 - 100 ? 127 - 100 : exponent;
  const uint32_t unit_bits = (exponent - 14) << 23, inverse_bits = (2 * 127 + 14 - exponent) << 23;
  float inverse;
  __builtin_memcpy(unit, &unit_bits, 4);
  __builtin_memcpy(&inverse, &inverse_bits, 4);
  for (int i = 0; i < 32; i++) {
    const float rounded = x[i] * inverse + 12582912.0f;  // 1.5 * 2^23: the code lies in the lowest bits
    int32_t code;
    __builtin_memcpy(&code, &rounded, 4);
    code -= 0x4B400000;
    codes[i] = static_cast<int16_t>(code > 32767 ? 32767 : code);
  }
}

// Rows of x as codes and units at their strides; what is behind the columns is zero, up to an even number of blocks.
static void encode_rows(const float* x, int64_t rows, int64_t columns, const CodedShape& shape, int16_t* codes,
                        float* units) {
  for (int64_t r = 0; r < rows; r++, x += columns, codes += shape.codes, units += shape.units) {
    int64_t c = 0;
    for (; c + 32 <= columns; c += 32) encode_block(x + c, codes + c, units + c / 32);
    if (c < columns) {
      float rest[32] = {};
      __builtin_memcpy(rest, x + c, static_cast<size_t>(columns - c) * 4);
      encode_block(rest, codes + c, units + c / 32);
      c += 32;
    }
    if (c % 64 != 0) {
      for (int i = 0; i < 32; i++) codes[c + i] = 0;
      units[c / 32] = 0.0f;
    }
  }
}

// weight scale * unit for the blocks of a panel, zeros behind them.
static inline void panel_factors(const uint16_t* scales, const float* units, int blocks, float* factor) {
  int b = 0;
  for (; b + 16 <= blocks; b += 16) half_products(scales + b, units + b, factor + b);
  if (b == blocks) return;
  uint16_t some[16] = {};
  float unit[16] = {};
  for (int i = 0; b + i < blocks; i++) {
    some[i] = scales[b + i];
    unit[i] = units[b + i];
  }
  half_products(some, unit, factor + b);
}

// Outputs o, o + step, ... of one tile.
struct Q8Outputs {
  int64_t o, step;
};

// Adds pairs of blocks [first, last) of R rows x N outputs to P parts of the lanes, from part h: sum[n][r][q]. `p` are the
// weights of the pair `first`.
template <int R, int N, int P, bool Ahead>
static inline __attribute__((always_inline)) void add_pairs(const int16_t* x, int64_t x_stride, const int8_t* const* p,
                                                            const float (*factor)[R][kQ8Blocks], int first, int last,
                                                            int h, Lanes (*sum)[R][P]) {
  for (int pair = first; pair < last; pair++) {
    const int64_t c = (pair - first) * 64;
    if (Ahead && h == 0)
      for (int n = 0; n < N; n++) __builtin_prefetch(p[n] + c + kQ8Ahead);
#pragma GCC unroll 2
    for (int q = 0; q < P; q++) {
      Wide wide[N];
      if constexpr (R > 1) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) wide[n] = widen(p[n] + c, h + q);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Wide value = codes_at(x + r * x_stride + pair * 64, h + q);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
          if constexpr (R == 1) wide[n] = widen(p[n] + c, h + q);  // one after the other: registers are for the sums
          sum[n][r][q] = fma(dot(wide[n], value), spread_pair(factor[n][r] + 2 * pair, h + q), sum[n][r][q]);
        }
      }
    }
  }
}

// `count` trees, four at a time where the level is faster so.
template <int Count>
static inline void sum_trees(const Lanes (*sum)[kParts], float* tree) {
  int i = 0;
  for (; i + 4 <= Count; i += 4) sum_lanes_of_4(sum + i, tree + i);
  for (; i < Count; i++) tree[i] = sum_lanes(sum[i]);
}

// R rows x N outputs over the panel from column c: written (the first panel) or added to y.
template <int R, int N, int P, bool Ahead>
static inline void q8_tile(const CodedRows& x, int64_t t, const WeightRows& w, const Q8Outputs& to, int64_t c, float* y,
                           int64_t y_stride) {
  const int64_t left = (w.columns - c + 31) / 32;
  const int blocks = static_cast<int>(left < kQ8Blocks ? left : kQ8Blocks);
  const int16_t* codes = x.codes + t * x.shape.codes + c;
  const int8_t* p[N];
  alignas(64) float factor[N][R][kQ8Blocks];
  for (int n = 0; n < N; n++) {
    const int64_t o = to.o + n * to.step;
    p[n] = static_cast<const int8_t*>(w.data) + o * w.stride + c;
    const uint16_t* scales = w.scales + o * w.scale_stride + c / 32;
    if (Ahead) __builtin_prefetch(scales + 2 * kQ8Blocks);
    for (int r = 0; r < R; r++) panel_factors(scales, x.units + (t + r) * x.shape.units + c / 32, blocks, factor[n][r]);
  }
  Lanes sum[N][R][kParts];
  for (int h = 0; h < kParts; h += P) {
    Lanes part[N][R][P];
#pragma GCC unroll 32
    for (int n = 0; n < N; n++)
#pragma GCC unroll 32
      for (int r = 0; r < R; r++)
#pragma GCC unroll 32
        for (int q = 0; q < P; q++) part[n][r][q] = zero();
    add_pairs<R, N, P, Ahead>(codes, x.shape.codes, p, factor, 0, blocks / 2, h, part);
    if (blocks % 2 != 0) {  // the block behind the last one is not ours to read
      alignas(64) int8_t rest[N][64] = {};
      const int8_t* q[N];
      for (int n = 0; n < N; n++) {
        __builtin_memcpy(rest[n], p[n] + blocks / 2 * 64, 32);
        q[n] = rest[n];
        for (int r = 0; r < R; r++) factor[n][r][blocks] = 0.0f;
      }
      add_pairs<R, N, P, false>(codes, x.shape.codes, q, factor, blocks / 2, blocks / 2 + 1, h, part);
    }
#pragma GCC unroll 32
    for (int n = 0; n < N; n++)
#pragma GCC unroll 32
      for (int r = 0; r < R; r++)
#pragma GCC unroll 32
        for (int q = 0; q < P; q++) sum[n][r][h + q] = part[n][r][q];
  }
  float tree[N * R];
  sum_trees<N * R>(sum[0], tree);
  for (int n = 0; n < N; n++)
    for (int r = 0; r < R; r++) {
      float* out = y + (t + r) * y_stride + to.o + n * to.step;
      *out = c == 0 ? tree[n * R + r] : *out + tree[n * R + r];
    }
}

// R rows over outputs [first, last), each output's weights once from memory. N outputs far apart are taken together: each
// is a long run of memory, which the processor's prefetch follows; N rows side by side are N runs of one row.
template <int R, int N, int P>
static void q8_stream(const CodedRows& x, const WeightRows& w, int64_t first, int64_t last, float* y, int64_t y_stride) {
  const int64_t step = (last - first) / N;
  for (int64_t o = first; o < first + step; o++)
    for (int64_t c = 0; c < w.columns; c += kQ8Panel) q8_tile<R, N, P, true>(x, 0, w, {o, step}, c, y, y_stride);
  for (int64_t o = first + N * step; o < last; o++)
    for (int64_t c = 0; c < w.columns; c += kQ8Panel) q8_tile<R, 1, P, true>(x, 0, w, {o, 1}, c, y, y_stride);
}

// Rows [t, t + R) over outputs [first, last) of one panel.
template <int R>
static inline void q8_rows(const CodedRows& x, int64_t t, const WeightRows& w, int64_t first, int64_t last, int64_t c,
                           float* y, int64_t y_stride) {
  int64_t o = first;
  for (; o + kQ8Outputs <= last; o += kQ8Outputs) q8_tile<R, kQ8Outputs, 1, false>(x, t, w, {o, 1}, c, y, y_stride);
  for (; o < last; o++) q8_tile<R, 1, 1, false>(x, t, w, {o, 1}, c, y, y_stride);
}

// One block of rows, panel by panel, so that a panel of x stays in the second level for all outputs.
static void q8_panels(const CodedRows& x, int64_t rows, const WeightRows& w, int64_t first, int64_t last, float* y,
                      int64_t y_stride) {
  for (int64_t c = 0; c < w.columns; c += kQ8Panel)
    for (int64_t o = first; o < last; o += kQ8Group) {
      const int64_t end = o + kQ8Group < last ? o + kQ8Group : last;
      // The outputs that come next, or the next panel of the first ones.
      const bool more = end + kQ8Group <= last;
      const int8_t* next = static_cast<const int8_t*>(w.data) + (more ? end * w.stride + c : first * w.stride + c + kQ8Panel);
      for (int64_t n = 0; n < end - o; n++)
        for (int64_t i = 0; i < kQ8Panel; i += 64) __builtin_prefetch(next + n * w.stride + i, 0, 2);
      int64_t t = 0;
      for (; t + kQ8Rows <= rows; t += kQ8Rows) q8_rows<kQ8Rows>(x, t, w, o, end, c, y, y_stride);
      for (; t + 2 <= rows; t += 2) q8_rows<2>(x, t, w, o, end, c, y, y_stride);
      if (t < rows) q8_rows<1>(x, t, w, o, end, c, y, y_stride);
    }
}

// Up to 4 rows.
static void q8_few(const CodedRows& x, int64_t rows, const WeightRows& w, int64_t first, int64_t last, float* y,
                   int64_t y_stride) {
  constexpr int kBoth = kParts < 2 ? 1 : 2;
  if (rows == 1) return q8_stream<1, 4, kBoth>(x, w, first, last, y, y_stride);
  if (rows == 2) return q8_stream<2, 2, kBoth>(x, w, first, last, y, y_stride);
  if (rows == 3) return q8_stream<3, 2, 1>(x, w, first, last, y, y_stride);
  q8_stream<4, 2, 1>(x, w, first, last, y, y_stride);
}

// At most kBlockRows rows.
static void linear_q8(const CodedRows& x, int64_t rows, const WeightRows& w, int64_t first, int64_t last, float* y,
                      int64_t y_stride) {
  if (rows >= kPackRows) return q8_panels(x, rows, w, first, last, y, y_stride);
  // Four rows bring the weights from memory, the others find them in the second level.
  const int64_t near = rows <= 4 ? last - first : kQ8Near / w.columns + 1;
  for (int64_t o = first; o < last; o += near)
    for (int64_t t = 0; t < rows; t += 4) {
      const CodedRows here{x.codes + t * x.shape.codes, x.units + t * x.shape.units, x.shape};
      q8_few(here, rows - t < 4 ? rows - t : 4, w, o, o + near < last ? o + near : last, y + t * y_stride, y_stride);
    }
}
