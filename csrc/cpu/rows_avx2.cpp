// The row kernels with eight floats at a time (AVX2, FMA, F16C).
#include "rows.h"

#include <immintrin.h>

namespace strata {
namespace avx2 {

using Lanes = __m256;
constexpr int kWidth = 8;
constexpr int kTileRows = 3;  // 3 x 4 tiles: 12 accumulators, 3 rows, 1 weight of 16 registers
constexpr int kTileOutputs = 4;
constexpr int kValueTile = 4;
constexpr int kQ8Rows = 4;  // 4 x 2 tiles of one part: 8 accumulators, 4 weights, 2 of x
constexpr int kQ8Outputs = 2;

static inline __m256i mask_of(int count) {
  alignas(32) static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  const int n = count < 0 ? 0 : (count > 8 ? 8 : count);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones + 8 - n));
}
static inline Lanes zero() { return _mm256_setzero_ps(); }
static inline Lanes broadcast(float x) { return _mm256_set1_ps(x); }
static inline Lanes load(const float* p) { return _mm256_loadu_ps(p); }
static inline Lanes load_some(const float* p, int count) { return _mm256_maskload_ps(p, mask_of(count)); }
static inline void store(float* p, Lanes a) { _mm256_storeu_ps(p, a); }
static inline void store_some(float* p, Lanes a, int count) { _mm256_maskstore_ps(p, mask_of(count), a); }
static inline Lanes load_bf16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
static inline Lanes load_bf16_some(const uint16_t* p, int count) {
  uint16_t part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < count && i < 8; i++) part[i] = p[i];
  return load_bf16(part);
}
static inline Lanes load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
static inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
static inline Lanes sub(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
static inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
static inline Lanes div(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
static inline Lanes neg(Lanes a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
static inline Lanes absolute(Lanes a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline Lanes root(Lanes a) { return _mm256_sqrt_ps(a); }
static inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
static inline Lanes smaller(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }

static inline Lanes scale_by_power(Lanes p, Lanes magic) {
  const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(magic), _mm256_set1_epi32(0x4B400000));
  const __m256i half = _mm256_srai_epi32(n, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high));
}
// An FP16 scale in every lane.
static inline Lanes broadcast_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(*p)));
}

// Q8_0 products (rows_q8.h): a part is one block of a pair.
struct Wide {
  __m256i low, high;
};
static inline Wide widen(const int8_t* pair, int part) {
  const __m128i* p = reinterpret_cast<const __m128i*>(pair + 32 * part);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), _mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1))};
}
static inline Wide codes_at(const int16_t* pair, int part) {
  const __m256i* p = reinterpret_cast<const __m256i*>(pair + 32 * part);
  return {_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)};
}
static inline Lanes dot(const Wide& w, const Wide& x) {
  return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(w.low, x.low), _mm256_madd_epi16(w.high, x.high)));
}
static inline Lanes spread_pair(const float* factor, int part) { return _mm256_broadcast_ss(factor + part); }
// Sixteen FP16 scales times sixteen units.
static inline void half_products(const uint16_t* scales, const float* units, float* y) {
  for (int i = 0; i < 16; i += 8) {
    const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + i)));
    store(y + i, mul(scale, load(units + i)));
  }
}

// Keeps a value in its register: the compiler would rather read it from memory again for each use.
static inline void hold(Lanes& a) { asm("" : "+x"(a)); }

static inline float sum_lanes(const Lanes* a) {
  const __m256 eight = _mm256_add_ps(a[0], a[1]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Four trees at once: y[n] = the tree over a[n], the same additions in the same order.
static inline void sum_lanes_of_4(const Lanes (*a)[2], float* y) {
  __m128 four[4];
  for (int n = 0; n < 4; n++) {
    const __m256 eight = _mm256_add_ps(a[n][0], a[n][1]);
    four[n] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  const __m128 low = _mm_add_ps(_mm_unpacklo_ps(four[0], four[1]), _mm_unpackhi_ps(four[0], four[1]));
  const __m128 high = _mm_add_ps(_mm_unpacklo_ps(four[2], four[3]), _mm_unpackhi_ps(four[2], four[3]));
  _mm_storeu_ps(y, _mm_add_ps(_mm_movelh_ps(low, high), _mm_movehl_ps(high, low)));
}

#include "rows_kernels.h"

}  // namespace avx2

const RowsTable rows_table_avx2 = avx2::make_table("avx2");

}  // namespace strata
