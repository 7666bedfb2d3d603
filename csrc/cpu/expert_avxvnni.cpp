// Expert kernels with AVX2 and AVX-VNNI: eight output rows a vector, four products a lane in one instruction.
#include <immintrin.h>

#include "expert.h"

namespace strata {
namespace {

#include "expert_eight.h"

struct Isa : Eight {
    static Ints dot(Ints acc, Bytes weights, const int8_t* codes) {
        return _mm256_dpbusd_avx_epi32(acc, weights, spread_codes(codes));
    }

    // Weights are the unsigned operand: 12 + 2 * E2M1, or 128 + code. The correction starts the sum.
    static int32_t correct_nibbles(int sum) { return -12 * sum; }
    static Ints dot_nibbles(Ints acc, Bytes weights, const int8_t* codes) { return dot(acc, weights, codes); }
    static Floats finish_nibbles(Ints acc) { return _mm256_cvtepi32_ps(acc); }

    static int32_t correct_bytes(int sum) { return -128 * sum; }
    static Ints start_bytes(const int32_t* correction) { return _mm256_set1_epi32(*correction); }
    static Bytes load_bytes(const uint8_t* p) { return _mm256_xor_si256(load(p), _mm256_set1_epi8(-128)); }
    static Ints dot_bytes(Ints acc, Bytes weights, const int8_t* codes) { return dot(acc, weights, codes); }
    static Floats finish_bytes(Ints acc) { return _mm256_cvtepi32_ps(acc); }
};

#include "expert_kernels.h"

}  // namespace

const ExpertKernels* expert_kernels_avxvnni(int format) { return table(format); }

}  // namespace strata
