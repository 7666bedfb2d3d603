#include "synthetic.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "gather.h"
#include "pool.h"

namespace strata {
namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;  // odd: places of one key never meet
constexpr uint64_t kTwist = 0xD6E8FEB86659FD93u;
constexpr size_t kLine = 64;
constexpr long kRun = 256;

inline uint64_t word_at(uint64_t key, uint64_t place) {
    const uint64_t x = key + (place + 1) * kStep;
    const unsigned __int128 product = static_cast<unsigned __int128>(x) * ((x ^ kTwist) | 1u);
    return static_cast<uint64_t>(product >> 64) ^ static_cast<uint64_t>(product);
}

// A line past the caches: what is filled is not read soon, and is as large as memory.
inline void store_line(unsigned char* target, const uint64_t* line) {
#if defined(__SSE2__)
    const __m128i* from = reinterpret_cast<const __m128i*>(line);
    __m128i* to = reinterpret_cast<__m128i*>(target);
    for (int part = 0; part < 4; ++part) _mm_stream_si128(to + part, _mm_loadu_si128(from + part));
#else
    std::memcpy(target, line, kLine);
#endif
}

// `words` (a multiple of 8, 16 or less than a line more) masked words to `target`.
inline void fill_words(unsigned char* target, size_t words, uint64_t key, uint64_t place, uint64_t mask, uint64_t set) {
    for (; words >= 8; words -= 8, place += 8, target += kLine) {
        uint64_t line[8];
        for (int i = 0; i < 8; ++i) line[i] = (word_at(key, place + i) & mask) | set;
        store_line(target, line);
    }
    for (; words != 0; --words, ++place, target += 8) {
        const uint64_t word = (word_at(key, place) & mask) | set;
        std::memcpy(target, &word, 8);
    }
}

float power_of_two(int exponent) {
    const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// BF16 of a number of eight bits times a power of two, which is exact.
inline uint16_t high_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
}

bool is_sane(int amplitude, int exponent) {
    return amplitude >= 1 && amplitude <= 127 && exponent >= -100 && exponent <= 100;
}

// `count` numbers from a place that is a multiple of 8 on, in runs of at most kRun given to `put(index, numbers, run)`.
template <class Put>
void each_run(uint64_t key, uint64_t first, long count, int amplitude, Put&& put) {
    const int range = 2 * amplitude + 1;
    for (long index = 0; index < count; index += kRun) {
        const long here = std::min(kRun, count - index);
        uint64_t words[kRun / 8];
        uint8_t bytes[kRun];
        int8_t numbers[kRun];
        for (long at = 0; at < kRun / 8; ++at) words[at] = word_at(key, (first + index) / 8 + at);
        std::memcpy(bytes, words, sizeof bytes);
        for (int at = 0; at < kRun; ++at) {  // in 16 bits, so that vectors of eight do
            numbers[at] = static_cast<int8_t>((static_cast<uint16_t>(bytes[at] * range) >> 8) - amplitude);
        }
        put(index, numbers, here);
    }
}

}  // namespace
}  // namespace strata

int strata_synthetic_blob(void* target, size_t nbytes, const uint64_t* recipe) {
    const size_t payload = recipe[kRecipePayload], block = recipe[kRecipeSuperblock], codes = recipe[kRecipeCodes];
    if (reinterpret_cast<uintptr_t>(target) % 16 != 0 || block == 0 || codes > block || payload > nbytes ||
        payload % block != 0 || (block | codes | nbytes) % strata::kLine != 0) {
        return strata::fail(strata::kBadArgument, "a computed blob of %zu bytes, %zu in blocks of %zu", nbytes, payload,
                            block);
    }
    unsigned char* out = static_cast<unsigned char*>(target);
    const uint64_t key = recipe[kRecipeKey];
    for (size_t at = 0; at < payload; at += block) {
        strata::fill_words(out + at, codes / 8, key, at / 8, recipe[kRecipeCodeAnd], recipe[kRecipeCodeOr]);
        strata::fill_words(out + at + codes, (block - codes) / 8, key, (at + codes) / 8, recipe[kRecipeScaleAnd],
                           recipe[kRecipeScaleOr]);
    }
#if defined(__SSE2__)
    _mm_sfence();  // the stores are visible before the ticket is complete
#endif
    std::memset(out + payload, 0, nbytes - payload);
    return strata::kOk;
}

int strata_synthetic_values(void* target, long first, long count, uint64_t key, int amplitude, int exponent, int type) {
    if (first < 0 || first % 8 != 0 || count < 0 || !strata::is_sane(amplitude, exponent) || type < 0 || type > 2) {
        return strata::fail(strata::kBadArgument, "%ld computed values from %ld on, amplitude %d, exponent %d, type %d",
                            count, first, amplitude, exponent, type);
    }
    const float step = strata::power_of_two(exponent);
    const uint64_t place = static_cast<uint64_t>(first);
    if (type == 0) {
        int8_t* out = static_cast<int8_t*>(target);
        strata::each_run(key, place, count, amplitude, [=](long at, const int8_t* numbers, long run) {
            std::memcpy(out + at, numbers, static_cast<size_t>(run));
        });
    } else if (type == 1) {
        uint16_t* out = static_cast<uint16_t*>(target);
        strata::each_run(key, place, count, amplitude, [=](long at, const int8_t* numbers, long run) {
            for (long i = 0; i < run; ++i) out[at + i] = strata::high_half(static_cast<float>(numbers[i]) * step);
        });
    } else {
        float* out = static_cast<float*>(target);
        strata::each_run(key, place, count, amplitude, [=](long at, const int8_t* numbers, long run) {
            for (long i = 0; i < run; ++i) out[at + i] = static_cast<float>(numbers[i]) * step;
        });
    }
    return strata::kOk;
}

int strata_synthetic_table(void* target, int64_t first, int64_t count, int64_t columns, uint64_t key, int amplitude,
                           int exponent) {
    constexpr int kQ8 = 2;
    const int64_t row_bytes = strata_table_row_bytes(kQ8, columns);
    if (row_bytes == 0 || columns % 8 != 0 || first < 0 || count < 0 || !strata::is_sane(amplitude, exponent) ||
        exponent < -14 || exponent > 15) {
        return strata::fail(strata::kBadArgument, "a computed table of %lld columns, amplitude %d, exponent %d",
                            static_cast<long long>(columns), amplitude, exponent);
    }
    const int64_t padded = (columns + 31) / 32 * 32;
    const uint16_t scale = static_cast<uint16_t>((exponent + 15) << 10);
    return strata::parallel(static_cast<long>(count), 1024, [&](long begin, long end) {
        for (long index = begin; index < end; ++index) {
            unsigned char* row = static_cast<unsigned char*>(target) + index * row_bytes;
            std::memset(row, 0, static_cast<size_t>(row_bytes));
            const uint64_t place = static_cast<uint64_t>(first + index) * static_cast<uint64_t>(columns);
            strata::each_run(key, place, static_cast<long>(columns), amplitude,
                             [=](long at, const int8_t* numbers, long run) {
                                 std::memcpy(row + at, numbers, static_cast<size_t>(run));
                             });
            for (int64_t block = 0; block < padded / 32; ++block) std::memcpy(row + padded + 2 * block, &scale, 2);
            const uint32_t word = strata::table_check_word(row, row_bytes - 4, first + index);
            std::memcpy(row + row_bytes - 4, &word, 4);
        }
    });
}
