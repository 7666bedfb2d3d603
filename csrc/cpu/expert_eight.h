// What the two levels with eight floats a vector share: all but their integer products. A level's file includes this text
// inside an anonymous namespace of its own, as it does expert_kernels.h, which says why.

struct Eight {
    static constexpr int kLanes = 8;
    using Floats = __m256;
    using Ints = __m256i;
    using Bytes = __m256i;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats sum(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats product(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats spread(const float* x) { return _mm256_broadcast_ss(x); }
    static void store(float* out, Floats x) { _mm256_storeu_ps(out, x); }
    // Stores x with 0 for what is not finite. Returns whether all were finite.
    static bool store_finite(float* out, Floats x) {
        const __m256i infinity = _mm256_set1_epi32(0x7F800000);
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i bad = _mm256_cmpeq_epi32(_mm256_and_si256(bits, infinity), infinity);
        _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_andnot_si256(bad, bits)));
        return _mm256_testz_si256(bad, bad) != 0;
    }
    static Bytes load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_bytes(uint8_t* out, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), x); }
    static Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
    static Bytes spread_codes(const int8_t* codes) {
        int32_t four;
        __builtin_memcpy(&four, codes, 4);
        return _mm256_set1_epi32(four);
    }

    static Ints start_nibbles(const int32_t* correction) { return _mm256_set1_epi32(*correction); }
    static void load_nibbles(const uint8_t* p, Bytes& even, Bytes& odd) {
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        const __m256i low = _mm256_set1_epi8(15);
        const __m256i bytes = load(p);
        even = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, low));
        odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
    }
    static Floats load_e4m3(const uint8_t* p) {
        const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return _mm256_cvtph_ps(_mm_slli_epi16(codes, 7));
    }

    static Floats load_half(const uint8_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }

    static void load_bf16_pairs(const uint8_t* p, Floats& low, Floats& high) {
        const __m256i bytes = load(p);
        low = _mm256_castsi256_ps(_mm256_slli_epi32(bytes, 16));
        high = _mm256_castsi256_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
    }
};
