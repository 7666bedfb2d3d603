// Expert kernels with AVX2, FMA and F16C: eight output rows a vector.
#include <immintrin.h>

#include "expert.h"

namespace strata {
namespace {

#include "expert_eight.h"

struct Isa : Eight {
    // Keeps the compiler from turning a chain of integer sums into a tree, whose leaves do not fit the registers.
    static Ints in_order(Ints x) {
        asm("" : "+x"(x));
        return x;
    }

    // Codes become 12 + 2 * E2M1 in 0..24, so that they can be the unsigned operand of maddubs; the correction
    // -12 * (sum of the activations' codes) starts the sum. Each 32-bit lane sums its four products in two 16-bit
    // halves; the correction goes to the lower one and neither can leave 16 bits (12 * 16 * 127 = 24,384).
    static int32_t correct_nibbles(int sum) { return (-12 * sum) & 0xFFFF; }
    static Ints dot_nibbles(Ints acc, Bytes weights, const int8_t* codes) {
        return in_order(_mm256_add_epi16(acc, _mm256_maddubs_epi16(weights, spread_codes(codes))));
    }
    static Floats finish_nibbles(Ints acc) {
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)));
    }

    // |weight| is the unsigned operand (128 for -128) and the sign goes to the activation, which is never -128. A
    // pair is at most 2 * 128 * 127 = 32,512.
    static int32_t correct_bytes(int) { return 0; }
    static Ints start_bytes(const int32_t*) { return _mm256_setzero_si256(); }
    static Bytes load_bytes(const uint8_t* p) { return load(p); }
    static Ints dot_bytes(Ints acc, Bytes weights, const int8_t* codes) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights),
                                                   _mm256_sign_epi8(spread_codes(codes), weights));
        return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }
    static Floats finish_bytes(Ints acc) { return _mm256_cvtepi32_ps(acc); }
};

#include "expert_kernels.h"

}  // namespace

const ExpertKernels* expert_kernels_avx2(int format) { return table(format); }

}  // namespace strata
