// Expert kernels without vector instructions: the definition in its plainest form, and what any processor runs.
#include "expert.h"

namespace strata {
namespace {

struct Isa {
    static constexpr int kLanes = 1;
    using Floats = float;
    using Ints = int32_t;
    struct Bytes {
        int8_t of[4];
    };

    static float zero() { return 0.0f; }
    static float sum(float a, float b) { return exact::sum(a, b); }
    static float product(float a, float b) { return exact::product(a, b); }
    static float fused(float a, float b, float c) { return exact::fused(a, b, c); }
    static float spread(const float* x) { return *x; }
    static void store(float* out, float x) { *out = x; }
    // Stores x, or 0 for what is not finite. Returns whether it was finite.
    static bool store_finite(float* out, float x) {
        const bool finite = exact::is_finite(x);
        *out = finite ? x : 0.0f;
        return finite;
    }

    static Bytes load(const uint8_t* p) {
        Bytes bytes;
        __builtin_memcpy(bytes.of, p, 4);
        return bytes;
    }
    static void store_bytes(uint8_t* out, Bytes x) { __builtin_memcpy(out, x.of, 4); }
    static float load_floats(const float* p) { return *p; }

    static int32_t dot(int32_t acc, Bytes weights, const int8_t* codes) {
        for (int i = 0; i < 4; ++i) acc += weights.of[i] * codes[i];
        return acc;
    }

    static int32_t correct_nibbles(int) { return 0; }
    static int32_t start_nibbles(const int32_t*) { return 0; }
    static void load_nibbles(const uint8_t* p, Bytes& even, Bytes& odd) {
        for (int i = 0; i < 4; ++i) {
            even.of[i] = static_cast<int8_t>(exact::doubled_e2m1(p[i] & 15u));
            odd.of[i] = static_cast<int8_t>(exact::doubled_e2m1(p[i] >> 4));
        }
    }
    static int32_t dot_nibbles(int32_t acc, Bytes weights, const int8_t* codes) { return dot(acc, weights, codes); }
    static float finish_nibbles(int32_t acc) { return static_cast<float>(acc); }
    static float load_e4m3(const uint8_t* p) { return exact::scaled_e4m3(*p); }

    static int32_t correct_bytes(int) { return 0; }
    static int32_t start_bytes(const int32_t*) { return 0; }
    static Bytes load_bytes(const uint8_t* p) { return load(p); }
    static int32_t dot_bytes(int32_t acc, Bytes weights, const int8_t* codes) { return dot(acc, weights, codes); }
    static float finish_bytes(int32_t acc) { return static_cast<float>(acc); }
    static float load_half(const uint8_t* p) { return exact::of_half(p[0] | static_cast<unsigned>(p[1]) << 8); }

    static void load_bf16_pairs(const uint8_t* p, float& low, float& high) {
        low = exact::of_bf16(p[0] | static_cast<unsigned>(p[1]) << 8);
        high = exact::of_bf16(p[2] | static_cast<unsigned>(p[3]) << 8);
    }
};

#include "expert_kernels.h"

}  // namespace

const ExpertKernels* expert_kernels_scalar(int format) { return table(format); }

}  // namespace strata
