// The row kernels with sixteen floats at a time (AVX-512 F, BW, DQ, VL).
#include "rows.h"

// GCC's own header starts some intrinsics from a register it calls undefined, and warns of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

namespace strata {
namespace avx512 {

using Lanes = __m512;
constexpr int kWidth = 16;
constexpr int kTileRows = 6;  // 6 x 4 tiles: 24 accumulators, 6 rows, 1 weight of 32 registers
constexpr int kTileOutputs = 4;
constexpr int kValueTile = 4;
constexpr int kQ8Rows = 4;  // 4 x 4 tiles: 16 accumulators, 8 weights, 2 of x
constexpr int kQ8Outputs = 4;

static inline __mmask16 mask_of(int count) {
  return count <= 0 ? 0 : (count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1));
}
static inline Lanes zero() { return _mm512_setzero_ps(); }
static inline Lanes broadcast(float x) { return _mm512_set1_ps(x); }
static inline Lanes load(const float* p) { return _mm512_loadu_ps(p); }
static inline Lanes load_some(const float* p, int count) { return _mm512_maskz_loadu_ps(mask_of(count), p); }
static inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a); }
static inline void store_some(float* p, Lanes a, int count) { _mm512_mask_storeu_ps(p, mask_of(count), a); }
static inline Lanes from_bf16(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
static inline Lanes load_bf16(const uint16_t* p) {
  return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline Lanes load_bf16_some(const uint16_t* p, int count) {
  return from_bf16(_mm256_maskz_loadu_epi16(mask_of(count), p));
}
static inline Lanes load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
static inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
static inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
static inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
static inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
static inline Lanes neg(Lanes a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
static inline Lanes absolute(Lanes a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
static inline Lanes root(Lanes a) { return _mm512_sqrt_ps(a); }
static inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
static inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }

static inline Lanes scale_by_power(Lanes p, Lanes magic) {
  const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(magic), _mm512_set1_epi32(0x4B400000));
  const __m512i half = _mm512_srai_epi32(n, 1);
  const __m512i bias = _mm512_set1_epi32(127);
  const __m512i low = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
  const __m512i high = _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(n, half), bias), 23);
  return _mm512_mul_ps(_mm512_mul_ps(p, _mm512_castsi512_ps(low)), _mm512_castsi512_ps(high));
}
static inline Lanes broadcast_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(*p)));
}

// Q8_0 products (rows_q8.h): the only part is both blocks of a pair, the even one in the lower eight lanes.
struct Wide {
  __m512i low, high;  // the first sixteen columns of both blocks, the last sixteen
};
static inline __m512i load_codes(const int16_t* even) {
  const __m256i* p = reinterpret_cast<const __m256i*>(even);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(p)), _mm256_loadu_si256(p + 2), 1);
}
static inline Wide widen(const int8_t* pair, int) {
  const __m512i quarters = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7), _mm512_loadu_si512(pair));
  return {_mm512_cvtepi8_epi16(_mm512_castsi512_si256(quarters)),
          _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(quarters, 1))};
}
static inline Wide codes_at(const int16_t* pair, int) { return {load_codes(pair), load_codes(pair + 16)}; }
static inline Lanes dot(const Wide& w, const Wide& x) {
  return _mm512_cvtepi32_ps(_mm512_dpwssd_epi32(_mm512_madd_epi16(w.low, x.low), w.high, x.high));
}
static inline Lanes spread_pair(const float* factor, int) {
  return _mm512_insertf32x8(_mm512_set1_ps(factor[0]), _mm256_set1_ps(factor[1]), 1);
}
// Sixteen FP16 scales times sixteen units.
static inline void half_products(const uint16_t* scales, const float* units, float* y) {
  store(y, mul(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales))), load(units)));
}
static inline void hold(Lanes& a) { asm("" : "+v"(a)); }

static inline float sum_lanes(const Lanes* a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a[0]), _mm512_extractf32x8_ps(a[0], 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline void sum_lanes_of_4(const Lanes (*a)[1], float* y) {
  for (int n = 0; n < 4; n++) y[n] = sum_lanes(a[n]);
}

#include "rows_kernels.h"

}  // namespace avx512

const RowsTable rows_table_avx512 = avx512::make_table("avx512");

}  // namespace strata
