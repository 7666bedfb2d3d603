#include "checksum.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "task_guard.h"

#define STRATA_EXPORT __attribute__((visibility("default")))

namespace {

constexpr int kLanes = 8;
constexpr size_t kStripe = kLanes * sizeof(uint64_t);
// A copy of at least this many bytes goes past the caches: it would not fit into them, and a cached store first reads
// what it overwrites.
constexpr size_t kStreamBytes = 256 * 1024;

// Odd constants with no pattern in their bits (fractions of the golden ratio and of square roots).
constexpr uint64_t kLaneMultiplier = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kFoldMultiplier = 0xBB67AE8584CAA73Bull;
constexpr uint64_t kMixMultiplier = 0x3C6EF372FE94F82Bull;

inline uint64_t rotate_left(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

inline uint64_t load_word(const unsigned char* address) {
    uint64_t word;
    std::memcpy(&word, address, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

inline void store_word(unsigned char* address, uint64_t word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    std::memcpy(address, &word, sizeof word);
}

struct Lanes {
    uint64_t value[kLanes];

    Lanes() {
        for (int lane = 0; lane < kLanes; ++lane) value[lane] = kMixMultiplier * static_cast<uint64_t>(lane + 1);
    }

    // Whole stripes only; `store(offset, word)` sees every word as it is taken. Local copies keep the lanes in
    // registers; eight independent chains hide the multiply.
    template <class Store>
    void take(const unsigned char* data, size_t stripes, Store&& store) {
        uint64_t a0 = value[0], a1 = value[1], a2 = value[2], a3 = value[3];
        uint64_t a4 = value[4], a5 = value[5], a6 = value[6], a7 = value[7];
        const auto step = [&](uint64_t lane, size_t at) {
            const uint64_t word = load_word(data + at);
            store(at, word);
            return rotate_left(lane ^ word, 31) * kLaneMultiplier;
        };
        for (size_t at = 0; at < stripes * kStripe; at += kStripe) {
            a0 = step(a0, at), a1 = step(a1, at + 8), a2 = step(a2, at + 16), a3 = step(a3, at + 24);
            a4 = step(a4, at + 32), a5 = step(a5, at + 40), a6 = step(a6, at + 48), a7 = step(a7, at + 56);
        }
        value[0] = a0, value[1] = a1, value[2] = a2, value[3] = a3;
        value[4] = a4, value[5] = a5, value[6] = a6, value[7] = a7;
    }

    void take(const unsigned char* data, size_t stripes) {
        take(data, stripes, [](size_t, uint64_t) {});
    }

    // The tail (less than a stripe), padded with zeros, then the fold. `nbytes` tells a padded zero from a real one.
    uint64_t finish(const unsigned char* tail, size_t tail_bytes, size_t nbytes) {
        if (tail_bytes != 0) {
            unsigned char padded[kStripe] = {};
            std::memcpy(padded, tail, tail_bytes);
            take(padded, 1);
        }
        uint64_t result = static_cast<uint64_t>(nbytes) * kFoldMultiplier;
        for (uint64_t lane : value) result = rotate_left(result ^ lane, 27) * kFoldMultiplier;
        result ^= result >> 32;
        result *= kMixMultiplier;
        result ^= result >> 29;
        return result;
    }
};

}  // namespace

namespace strata {

RunningChecksum::RunningChecksum() { std::memcpy(lanes_, Lanes().value, sizeof lanes_); }

void RunningChecksum::take(const void* piece, size_t nbytes) {
    const unsigned char* data = static_cast<const unsigned char*>(piece);
    Lanes lanes;
    std::memcpy(lanes.value, lanes_, sizeof lanes_);
    lanes.take(data, nbytes / kStripe);
    std::memcpy(lanes_, lanes.value, sizeof lanes_);
    nbytes_ += nbytes;
    tail_ = data + nbytes / kStripe * kStripe;
}

uint64_t RunningChecksum::finish() {
    Lanes lanes;
    std::memcpy(lanes.value, lanes_, sizeof lanes_);
    return lanes.finish(tail_, nbytes_ % kStripe, nbytes_);
}

}  // namespace strata

extern "C" {

STRATA_EXPORT uint64_t strata_checksum(const void* source, size_t nbytes) {
    const unsigned char* data = static_cast<const unsigned char*>(source);
    Lanes lanes;
    const size_t stripes = nbytes / kStripe;
    lanes.take(data, stripes);
    return lanes.finish(data + stripes * kStripe, nbytes % kStripe, nbytes);
}

STRATA_EXPORT int strata_checksum_of(const void* source, size_t nbytes, uint64_t* sum) {
    return strata::guarded([&] {
        *sum = strata_checksum(source, nbytes);
        return 0;
    });
}

STRATA_EXPORT uint64_t strata_copy_with_checksum(void* target, const void* source, size_t nbytes) {
    unsigned char* out = static_cast<unsigned char*>(target);
    const unsigned char* data = static_cast<const unsigned char*>(source);
    Lanes lanes;
    const size_t stripes = nbytes / kStripe;
#if defined(__SSE2__)
    if (nbytes >= kStreamBytes && reinterpret_cast<uintptr_t>(out) % 8 == 0) {
        lanes.take(data, stripes, [out](size_t at, uint64_t word) {
            _mm_stream_si64(reinterpret_cast<long long*>(out + at), static_cast<long long>(word));
        });
        _mm_sfence();  // stores past the caches are ordered before whatever tells of the copy
    } else
#endif
    {
        lanes.take(data, stripes, [out](size_t at, uint64_t word) { store_word(out + at, word); });
    }
    const size_t whole = stripes * kStripe;
    if (whole < nbytes) std::memcpy(out + whole, data + whole, nbytes - whole);
    return lanes.finish(data + whole, nbytes - whole, nbytes);
}
}
