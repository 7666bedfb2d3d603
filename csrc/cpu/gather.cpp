#include "gather.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "pool.h"
#include "status.h"

#define STRATA_EXPORT __attribute__((visibility("default")))

namespace {

constexpr int64_t kWordBytes = 4;
constexpr int64_t kGrain = 64;  // rows a thread takes at a time; one token's rows stay on the caller

constexpr int kWrongWord = -1;

uint32_t check_word(const unsigned char* row, int64_t payload_bytes, int64_t number) {
    uint32_t sum = static_cast<uint32_t>(number) * 0x85EBCA77u + 0xC2B2AE3Du;
    uint32_t weight = 0;
    for (int64_t at = 0; at < payload_bytes; ++at) {
        weight += 0x9E3779B1u;
        sum += row[at] * (weight | 1u);
    }
    return sum;
}

// 0, an errno, or kWrongWord; a file that ends early is reported through `short_read`.
int read_row(int descriptor, int64_t row_bytes, int64_t number, unsigned char* out, bool* short_read) {
    int64_t done = 0;
    while (done < row_bytes) {
        const ssize_t got = pread(descriptor, out + done, static_cast<size_t>(row_bytes - done),
                                  static_cast<off_t>(number * row_bytes + done));
        if (got < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (got == 0) {
            *short_read = true;
            return 0;
        }
        done += got;
    }
    uint32_t word;
    std::memcpy(&word, out + row_bytes - kWordBytes, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word == check_word(out, row_bytes - kWordBytes, number) ? 0 : kWrongWord;
}

}  // namespace

extern "C" STRATA_EXPORT int strata_gather_rows(int descriptor, int64_t row_bytes, const int64_t* ids, int64_t count,
                                                void* out, int64_t* bad_row, int* bad_errno) {
    if (row_bytes <= kWordBytes || count < 0 || ids == nullptr || out == nullptr) {
        return strata::fail(strata::kBadArgument, "gather: %lld rows of %lld bytes", static_cast<long long>(count),
                            static_cast<long long>(row_bytes));
    }
    unsigned char* rows = static_cast<unsigned char*>(out);
    std::atomic<int64_t> first_bad{count};  // the smallest place, so that the report does not depend on timing
    const auto body = [&](long begin, long end) -> int {
        for (long place = begin; place < end; ++place) {
            bool short_read = false;
            const int error = read_row(descriptor, row_bytes, ids[place], rows + place * row_bytes, &short_read);
            if (error == 0 && !short_read) continue;
            int64_t seen = first_bad.load();
            while (place < seen && !first_bad.compare_exchange_weak(seen, place)) {
            }
        }
        return strata::kOk;
    };
    if (count <= kGrain) {
        body(0, static_cast<long>(count));
    } else {
        strata::parallel(static_cast<long>(count), kGrain, body);
    }
    if (first_bad.load() == count) return strata::kOk;
    const int64_t place = first_bad.load();
    bool short_read = false;
    *bad_row = ids[place];
    *bad_errno = read_row(descriptor, row_bytes, ids[place], rows + place * row_bytes, &short_read);
    return strata::fail(strata::kTaskFault, "gather: row %lld", static_cast<long long>(*bad_row));
}
