#include "gather.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#include "pool.h"
#include "scratch.h"
#include "status.h"

#define STRATA_EXPORT __attribute__((visibility("default")))

namespace {

constexpr int64_t kWordBytes = 4;
constexpr int64_t kGrain = 64;  // rows a thread takes at a time; one token's rows stay on the caller
constexpr int kWrongWord = -1;
constexpr int kFileEnds = -2;  // 0 to the caller; apart from success in here

enum Format : int { kF32 = 0, kBf16 = 1, kQ8 = 2, kF8 = 3 };

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t payload_bytes(int format, int64_t columns) {
    switch (format) {
        case kF32: return 4 * columns;
        case kBf16: return 2 * columns;
        case kQ8: return round_up(columns, 32) / 32 * 34;
        case kF8: return round_up(columns, 4) + 4;
        default: return 0;
    }
}

template <class T>
T load(const unsigned char* address) {  // the host is little-endian, as the file is
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return from_bits(sign | 0x7F800000u | (magnitude & 0x3FF) << 13);
    if (magnitude < 0x0400) {  // subnormal: a multiple of 2^-24, exact
        const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    return from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

float e4m3_to_float(unsigned char code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
    const uint32_t magnitude = code & 0x7F;
    if (magnitude < 8) {  // subnormal: a multiple of 2^-9, exact
        const float value = static_cast<float>(magnitude) * 0.001953125f;
        return sign ? -value : value;
    }
    return from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

void decode(int format, int64_t columns, const unsigned char* row, float* out) {
    switch (format) {
        case kF32: std::memcpy(out, row, static_cast<size_t>(columns) * 4); return;
        case kBf16:
            for (int64_t at = 0; at < columns; ++at) out[at] = from_bits(uint32_t{load<uint16_t>(row + 2 * at)} << 16);
            return;
        case kQ8: {
            const unsigned char* scales = row + round_up(columns, 32);
            for (int64_t first = 0; first < columns; first += 32) {
                const float scale = half_to_float(load<uint16_t>(scales + first / 16));
                const int64_t end = first + 32 < columns ? first + 32 : columns;
                for (int64_t at = first; at < end; ++at) out[at] = static_cast<float>(load<int8_t>(row + at)) * scale;
            }
            return;
        }
        default: {
            const float scale = load<float>(row + round_up(columns, 4));
            for (int64_t at = 0; at < columns; ++at) out[at] = e4m3_to_float(row[at]) * scale;
        }
    }
}

// Memory of a row that its thread keeps: a slice may be left in its middle (task_guard.h). Null: there is none.
unsigned char* room_for_row(int64_t row_bytes) {
    static thread_local std::unique_ptr<unsigned char[]> kept;
    static thread_local int64_t size = 0;
    if (size < row_bytes) {
        kept.reset(new (std::nothrow) unsigned char[static_cast<size_t>(row_bytes)]);
        size = kept ? row_bytes : 0;
    }
    if (kept) strata::poison_scratch(kept.get(), static_cast<size_t>(row_bytes));
    return kept.get();
}

// 0, an errno, kWrongWord or kFileEnds.
int read_row(int descriptor, int64_t row_bytes, int64_t number, unsigned char* row) {
    int64_t done = 0;
    while (done < row_bytes) {
        const ssize_t got = pread(descriptor, row + done, static_cast<size_t>(row_bytes - done),
                                  static_cast<off_t>(number * row_bytes + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return kFileEnds;
        done += got;
    }
    const int64_t payload = row_bytes - kWordBytes;
    return load<uint32_t>(row + payload) == strata::table_check_word(row, payload, number) ? 0 : kWrongWord;
}

}  // namespace

uint32_t strata::table_check_word(const unsigned char* row, int64_t nbytes, int64_t number) {
    uint32_t sum = static_cast<uint32_t>(number) * 0x85EBCA77u + 0xC2B2AE3Du;
    for (int64_t at = 0; at < nbytes; ++at) sum += row[at] * (static_cast<uint32_t>(at + 1) * 0x9E3779B1u | 1u);
    return sum;
}

extern "C" {

STRATA_EXPORT int64_t strata_table_row_bytes(int format, int64_t columns) {
    const int64_t payload = payload_bytes(format, columns);
    return payload > 0 ? round_up(payload, 4) + kWordBytes : 0;
}

STRATA_EXPORT int strata_gather_rows(int descriptor, int format, int64_t columns, const int64_t* ids, int64_t count,
                                     float* out, int64_t* bad_row, int* bad_errno) {
    const int64_t row_bytes = strata_table_row_bytes(format, columns);
    if (row_bytes == 0 || columns < 1 || count < 0 || ids == nullptr || out == nullptr) {
        return strata::fail(strata::kBadArgument, "gather: %lld rows of %lld columns in format %d",
                            static_cast<long long>(count), static_cast<long long>(columns), format);
    }
    std::atomic<int64_t> first_bad{count};  // the smallest place, so that the report does not depend on timing
    const auto body = [&](long begin, long end) -> int {
        unsigned char* row = room_for_row(row_bytes);
        if (row == nullptr) return strata::fail(strata::kNoMemory, "gather: a row of %lld bytes", (long long)row_bytes);
        for (long place = begin; place < end; ++place) {
            if (read_row(descriptor, row_bytes, ids[place], row) == 0) {
                decode(format, columns, row, out + place * columns);
                continue;
            }
            int64_t seen = first_bad.load();
            while (place < seen && !first_bad.compare_exchange_weak(seen, place)) {
            }
        }
        return strata::kOk;
    };
    const int status = count <= kGrain ? body(0, static_cast<long>(count))
                                       : strata::parallel(static_cast<long>(count), kGrain, body);
    if (status != strata::kOk || first_bad.load() == count) return status;
    *bad_row = ids[first_bad.load()];
    unsigned char* row = room_for_row(row_bytes);
    if (row == nullptr) return strata::fail(strata::kNoMemory, "gather: a row of %lld bytes", (long long)row_bytes);
    const int error = read_row(descriptor, row_bytes, *bad_row, row);
    *bad_errno = error == kFileEnds ? 0 : error == 0 ? kWrongWord : error;
    return strata::fail(strata::kTaskFault, "gather: row %lld", static_cast<long long>(*bad_row));
}
}
