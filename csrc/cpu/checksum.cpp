#include "checksum.h"

#include <cstring>

#define STRATA_EXPORT __attribute__((visibility("default")))

namespace {

constexpr int kLanes = 8;
constexpr size_t kStripe = kLanes * sizeof(uint64_t);
constexpr size_t kCopyBlock = 16 * 1024;  // copied, then hashed while it still lies in the first cache

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

struct Lanes {
    uint64_t value[kLanes];

    Lanes() {
        for (int lane = 0; lane < kLanes; ++lane) value[lane] = kMixMultiplier * static_cast<uint64_t>(lane + 1);
    }

    // Whole stripes only. Local copies keep the lanes in registers; eight independent chains hide the multiply.
    void take(const unsigned char* data, size_t stripes) {
        uint64_t a0 = value[0], a1 = value[1], a2 = value[2], a3 = value[3];
        uint64_t a4 = value[4], a5 = value[5], a6 = value[6], a7 = value[7];
        for (size_t stripe = 0; stripe < stripes; ++stripe, data += kStripe) {
            a0 = rotate_left(a0 ^ load_word(data), 31) * kLaneMultiplier;
            a1 = rotate_left(a1 ^ load_word(data + 8), 31) * kLaneMultiplier;
            a2 = rotate_left(a2 ^ load_word(data + 16), 31) * kLaneMultiplier;
            a3 = rotate_left(a3 ^ load_word(data + 24), 31) * kLaneMultiplier;
            a4 = rotate_left(a4 ^ load_word(data + 32), 31) * kLaneMultiplier;
            a5 = rotate_left(a5 ^ load_word(data + 40), 31) * kLaneMultiplier;
            a6 = rotate_left(a6 ^ load_word(data + 48), 31) * kLaneMultiplier;
            a7 = rotate_left(a7 ^ load_word(data + 56), 31) * kLaneMultiplier;
        }
        value[0] = a0, value[1] = a1, value[2] = a2, value[3] = a3;
        value[4] = a4, value[5] = a5, value[6] = a6, value[7] = a7;
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

extern "C" {

STRATA_EXPORT uint64_t strata_checksum(const void* source, size_t nbytes) {
    const unsigned char* data = static_cast<const unsigned char*>(source);
    Lanes lanes;
    const size_t stripes = nbytes / kStripe;
    lanes.take(data, stripes);
    return lanes.finish(data + stripes * kStripe, nbytes % kStripe, nbytes);
}

STRATA_EXPORT uint64_t strata_copy_with_checksum(void* target, const void* source, size_t nbytes) {
    unsigned char* out = static_cast<unsigned char*>(target);
    const unsigned char* data = static_cast<const unsigned char*>(source);
    Lanes lanes;
    size_t left = nbytes;
    while (left >= kCopyBlock) {
        std::memcpy(out, data, kCopyBlock);
        lanes.take(data, kCopyBlock / kStripe);
        out += kCopyBlock, data += kCopyBlock, left -= kCopyBlock;
    }
    std::memcpy(out, data, left);
    lanes.take(data, left / kStripe);
    return lanes.finish(data + left / kStripe * kStripe, left % kStripe, nbytes);
}
}
