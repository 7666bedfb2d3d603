// The row kernels with one float at a time: the definition that every other level must equal, and the level of a
// processor without AVX2. fmaf is exact with or without FMA hardware.
#include "rows.h"

#include <cstring>

namespace strata {
namespace scalar {

struct Lanes {
  float v;
};
constexpr int kWidth = 1;         // floats in one Lanes
constexpr int kTileRows = 1;      // rows x outputs of the register tile
constexpr int kTileOutputs = 1;
constexpr int kValueTile = 1;     // Lanes of a value row that one attention tile holds
constexpr int kQ8Rows = 2;        // rows x outputs of the register tile of a Q8_0 product
constexpr int kQ8Outputs = 1;

static inline Lanes zero() { return {0.0f}; }
static inline Lanes broadcast(float x) { return {x}; }
static inline Lanes load(const float* p) { return {*p}; }
static inline Lanes load_some(const float* p, int count) { return {count > 0 ? *p : 0.0f}; }
static inline void store(float* p, Lanes a) { *p = a.v; }
static inline void store_some(float* p, Lanes a, int count) {
  if (count > 0) *p = a.v;
}
static inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline Lanes load_bf16(const uint16_t* p) { return {bits_to_float(static_cast<uint32_t>(*p) << 16)}; }
static inline Lanes load_bf16_some(const uint16_t* p, int count) { return count > 0 ? load_bf16(p) : zero(); }
static inline Lanes load_i8(const int8_t* p) { return {static_cast<float>(*p)}; }
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {__builtin_fmaf(a.v, b.v, c.v)}; }
static inline Lanes add(Lanes a, Lanes b) { return {a.v + b.v}; }
static inline Lanes sub(Lanes a, Lanes b) { return {a.v - b.v}; }
static inline Lanes mul(Lanes a, Lanes b) { return {a.v * b.v}; }
static inline Lanes div(Lanes a, Lanes b) { return {a.v / b.v}; }
static inline Lanes neg(Lanes a) { return {-a.v}; }
static inline Lanes absolute(Lanes a) { return {__builtin_fabsf(a.v)}; }
static inline Lanes root(Lanes a) { return {__builtin_sqrtf(a.v)}; }
// a where a > b, else b: a NaN in either gives b.
static inline Lanes larger(Lanes a, Lanes b) { return {a.v > b.v ? a.v : b.v}; }
static inline Lanes smaller(Lanes a, Lanes b) { return {a.v < b.v ? a.v : b.v}; }

// p * 2^n in two exact-or-rounded-once steps; n is the integer that `magic` (1.5 * 2^23 + n) carries in its bits.
static inline Lanes scale_by_power(Lanes p, Lanes magic) {
  int32_t n;
  std::memcpy(&n, &magic.v, 4);
  n -= 0x4B400000;
  const int32_t half = n >> 1;
  return {p.v * bits_to_float(static_cast<uint32_t>(half + 127) << 23) *
          bits_to_float(static_cast<uint32_t>(n - half + 127) << 23)};
}

static inline Lanes broadcast_half(const uint16_t* p) {
  const uint32_t sign = static_cast<uint32_t>(*p & 0x8000) << 16;
  const uint32_t exponent = (*p >> 10) & 31, mantissa = *p & 1023;
  if (exponent == 31) return {bits_to_float(sign | 0x7F800000 | (mantissa << 13))};
  if (exponent == 0) {
    const float x = static_cast<float>(mantissa) * 0x1p-24f;
    return {sign ? -x : x};
  }
  return {bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13))};
}
static inline void hold(Lanes&) {}

// Q8_0 products (rows_q8.h): part h is one lane of a pair of blocks, columns 2i, 2i + 1, 16 + 2i, 17 + 2i of block h / 8.
struct Wide {
  int32_t w[4];
};
static inline int64_t first_column(int part) { return part / 8 * 32 + part % 8 * 2; }
static inline Wide widen(const int8_t* pair, int part) {
  const int8_t* p = pair + first_column(part);
  return {{p[0], p[1], p[16], p[17]}};
}
static inline Wide codes_at(const int16_t* pair, int part) {
  const int16_t* p = pair + first_column(part);
  return {{p[0], p[1], p[16], p[17]}};
}
static inline Lanes dot(const Wide& w, const Wide& x) {
  return {static_cast<float>(w.w[0] * x.w[0] + w.w[1] * x.w[1] + w.w[2] * x.w[2] + w.w[3] * x.w[3])};
}
static inline Lanes spread_pair(const float* factor, int part) { return {factor[part / 8]}; }
// Sixteen FP16 scales times sixteen units.
static inline void half_products(const uint16_t* scales, const float* units, float* y) {
  for (int i = 0; i < 16; i++) y[i] = broadcast_half(scales + i).v * units[i];
}

// The tree over 16 lanes.
static inline float sum_lanes(const Lanes* a) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = a[i].v + a[i + 8].v;
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

static inline void sum_lanes_of_4(const Lanes (*a)[16], float* y) {
  for (int n = 0; n < 4; n++) y[n] = sum_lanes(a[n]);
}

#include "rows_kernels.h"

}  // namespace scalar

const RowsTable rows_table_scalar = scalar::make_table("scalar");

}  // namespace strata
