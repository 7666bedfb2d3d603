// Expert kernels with AVX-512 and VNNI: the sixteen output rows of a group are one vector.
#include <immintrin.h>

#include "expert.h"

namespace strata {
namespace {

struct Isa {
    static constexpr int kLanes = 16;
    using Floats = __m512;
    using Ints = __m512i;
    using Bytes = __m512i;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats sum(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats spread(const float* x) { return _mm512_set1_ps(*x); }
    static void store(float* out, Floats x) { _mm512_storeu_ps(out, x); }
    // Stores x with 0 for what is not finite. Returns whether all were finite.
    static bool store_finite(float* out, Floats x) {
        const __m512i infinity = _mm512_set1_epi32(0x7F800000);
        const __m512i bits = _mm512_castps_si512(x);
        const __mmask16 good = _mm512_cmpneq_epi32_mask(_mm512_and_si512(bits, infinity), infinity);
        _mm512_storeu_ps(out, _mm512_maskz_mov_ps(good, x));
        return good == 0xFFFF;
    }
    static Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static void store_bytes(uint8_t* out, Bytes x) { _mm512_storeu_si512(out, x); }
    static Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
    static Ints dot(Ints acc, Bytes weights, const int8_t* codes) {
        int32_t four;
        __builtin_memcpy(&four, codes, 4);
        return _mm512_dpbusd_epi32(acc, weights, _mm512_set1_epi32(four));
    }

    // Weights are the unsigned operand: 12 + 2 * E2M1, or 128 + code. The correction starts the sum.
    static int32_t correct_nibbles(int sum) { return -12 * sum; }
    static Ints start_nibbles(const int32_t* correction) { return _mm512_set1_epi32(*correction); }
    static void load_nibbles(const uint8_t* p, Bytes& even, Bytes& odd) {
        const __m512i table = _mm512_broadcast_i32x4(
            _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i bytes = load(p);
        even = _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, low));
        odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
    }
    static Ints dot_nibbles(Ints acc, Bytes weights, const int8_t* codes) { return dot(acc, weights, codes); }
    static Floats finish_nibbles(Ints acc) { return _mm512_cvtepi32_ps(acc); }
    static Floats load_e4m3(const uint8_t* p) {
        const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_cvtph_ps(_mm256_slli_epi16(codes, 7));
    }

    static int32_t correct_bytes(int sum) { return -128 * sum; }
    static Ints start_bytes(const int32_t* correction) { return _mm512_set1_epi32(*correction); }
    static Bytes load_bytes(const uint8_t* p) { return _mm512_xor_si512(load(p), _mm512_set1_epi8(-128)); }
    static Ints dot_bytes(Ints acc, Bytes weights, const int8_t* codes) { return dot(acc, weights, codes); }
    static Floats finish_bytes(Ints acc) { return _mm512_cvtepi32_ps(acc); }
    static Floats load_half(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }

    static void load_bf16_pairs(const uint8_t* p, Floats& low, Floats& high) {
        const __m512i bytes = load(p);
        low = _mm512_castsi512_ps(_mm512_slli_epi32(bytes, 16));
        high = _mm512_castsi512_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
    }
};

// Fifteen cores read nearer to what memory gives when they ask further ahead and for the second-level cache, which has
// room for more that is under way.
#define STRATA_PREFETCH_BYTES 4096
#define STRATA_PREFETCH_TO 2

#include "expert_kernels.h"

}  // namespace

const ExpertKernels* expert_kernels_avx512(int format) { return table(format); }

}  // namespace strata
