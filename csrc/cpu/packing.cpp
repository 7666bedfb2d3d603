// Quantises expert weights and puts them where a blob has them: the pack writer's two hot loops, on the pool.
// The results are those of strata.quant (blocks.py, layout.py), bit for bit; a test holds it. Plain loops without
// intrinsics: a pack is written once, and one core does some hundred million weights a second.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "exact.h"
#include "pool.h"
#include "status.h"

namespace strata {
namespace {

enum SourceType : int { kFloat32 = 0, kBfloat16 = 1 };

constexpr int kNvfp4Width = 16, kQ8Width = 32;
constexpr long kRowsPerSlice = 16;

// `width` weights of a row from `first` on as FP32, zeros past `columns`.
void read_block(const void* row, int type, long first, int width, long columns, float* out) {
    const int whole = static_cast<int>(std::min<long>(width, columns - first));
    if (type == kFloat32) {
        std::memcpy(out, static_cast<const float*>(row) + first, sizeof(float) * whole);
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(row) + first;
        for (int i = 0; i < whole; ++i) out[i] = exact::of_bf16(from[i]);
    }
    for (int i = whole; i < width; ++i) out[i] = 0.0f;
}

unsigned largest_magnitude(const float* x, int count) {
    unsigned largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, exact::magnitude(x[i]));
    return largest;
}

// The nearest E4M3 code, ties to even, of 0 <= x <= 448.
uint8_t nearest_e4m3(float x) {
    constexpr float kSmallestNormal = 0x1p-6f;
    if (x < kSmallestNormal) return static_cast<uint8_t>(exact::nearest(x * 0x1p9f));  // 8 is the smallest normal
    const unsigned bits = exact::bits_of(x);
    const unsigned rounded = bits + 0x7FFFFu + ((bits >> 20) & 1u);
    return static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

// The nearest FP16 bits, ties to even, of 0 <= x <= 65,504.
uint16_t nearest_half(float x) {
    if (x < 0x1p-14f) return static_cast<uint16_t>(exact::nearest(x * 0x1p24f));
    const unsigned bits = exact::bits_of(x);
    const unsigned rounded = bits + 0xFFFu + ((bits >> 13) & 1u);
    return static_cast<uint16_t>((rounded >> 13) - (112u << 10));
}

struct Source {
    const void* weights;
    int type;
    long rows, columns;  // of one matrix

    const void* row(long index) const {
        return static_cast<const uint8_t*>(weights) + index * columns * (type == kFloat32 ? 4 : 2);
    }
};

void quantise_nvfp4_row(const void* row, const Source& source, float tensor_scale, uint8_t* codes, uint8_t* scales) {
    const long bytes = (source.columns + 1) / 2;
    for (long first = 0; first < source.columns; first += kNvfp4Width) {
        float x[kNvfp4Width];
        read_block(row, source.type, first, kNvfp4Width, source.columns, x);
        const float largest = exact::float_of(largest_magnitude(x, kNvfp4Width));
        const uint8_t scale = nearest_e4m3(std::min(largest / (6.0f * tensor_scale), 448.0f));
        const float step = exact::scaled_e4m3(scale) * 256.0f * tensor_scale;
        const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
        int found[kNvfp4Width];
        for (int i = 0; i < kNvfp4Width; ++i) {
            const float size = inverse * exact::float_of(exact::magnitude(x[i]));
            // Edges between neighbouring values; a tie goes to the even code.
            const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                             (size >= 3.5f) + (size > 5.0f);
            found[i] = code | (x[i] < 0.0f ? 8 : 0);
        }
        scales[first / kNvfp4Width] = scale;
        for (int i = 0; i < kNvfp4Width && first / 2 + i / 2 < bytes; i += 2)
            codes[first / 2 + i / 2] = static_cast<uint8_t>(found[i] | found[i + 1] << 4);
    }
}

void quantise_q8_row(const void* row, const Source& source, int8_t* codes, uint16_t* scales) {
    for (long first = 0; first < source.columns; first += kQ8Width) {
        float x[kQ8Width];
        read_block(row, source.type, first, kQ8Width, source.columns, x);
        const float largest = exact::float_of(largest_magnitude(x, kQ8Width));
        const uint16_t scale = nearest_half(std::min(largest / 127.0f, 65504.0f));
        const float step = exact::of_half(scale);
        scales[first / kQ8Width] = scale;
        const int width = static_cast<int>(std::min<long>(kQ8Width, source.columns - first));
        for (int i = 0; i < width; ++i) {
            const float ratio = step > 0.0f ? x[i] / step : 0.0f;
            codes[first + i] = static_cast<int8_t>(exact::nearest(std::min(std::max(ratio, -127.0f), 127.0f)));
        }
    }
}

// Copies a matrix of 32-bit words [rows, words] to the places of its groups: step by step 16 rows.
struct Place {
    const uint8_t* codes;   // [experts, rows, code_bytes]
    const uint8_t* scales;  // [experts, rows, scale_bytes]
    uint8_t* blobs;
    long rows, code_bytes, scale_bytes;
    long blob_bytes, offset, group_stride;  // bytes from blob to blob, to the first group, from group to group
    long superblocks, superblock_codes, superblock_bytes;
    long unit;  // bytes of one scale
};

// Units of one superblock's rows, row after row, to unit after unit of all rows. `unit` is a constant at each call.
template <long unit>
void interleave(const uint8_t* const* rows, int count, long bytes, uint8_t* out) {
    for (long at = 0; at + unit <= bytes; at += unit)
        for (int r = 0; r < count; ++r) std::memcpy(out + at * exact::kGroup + r * unit, rows[r] + at, unit);
    if (const long rest = bytes % unit; rest > 0)  // the end of a row whose width is no multiple of the unit
        for (int r = 0; r < count; ++r)
            std::memcpy(out + (bytes - rest) * exact::kGroup + r * unit, rows[r] + bytes - rest, rest);
}

void pack_group(const Place& place, long expert, long group) {
    const long first = expert * place.rows + group * exact::kGroup;
    const int count = static_cast<int>(std::min<long>(exact::kGroup, place.rows - group * exact::kGroup));
    const long row_codes = place.superblock_codes / exact::kGroup;                              // of a superblock
    const long row_scales = (place.superblock_bytes - place.superblock_codes) / exact::kGroup;  // likewise
    uint8_t* out = place.blobs + expert * place.blob_bytes + place.offset + group * place.group_stride;
    for (long s = 0; s < place.superblocks; ++s, out += place.superblock_bytes) {
        const uint8_t *codes[exact::kGroup], *scales[exact::kGroup];
        for (int r = 0; r < count; ++r) {
            codes[r] = place.codes + (first + r) * place.code_bytes + s * row_codes;
            scales[r] = place.scales + (first + r) * place.scale_bytes + s * row_scales;
        }
        interleave<4>(codes, count, std::min(place.code_bytes - s * row_codes, row_codes), out);
        const long scale_bytes = std::min(place.scale_bytes - s * row_scales, row_scales);
        if (place.unit == 1) interleave<1>(scales, count, scale_bytes, out + place.superblock_codes);
        if (place.unit == 2) interleave<2>(scales, count, scale_bytes, out + place.superblock_codes);
    }
}

}  // namespace
}  // namespace strata

// Quantises `matrices` matrices of rows x columns weights (type 0 FP32, 1 BF16) to NVFP4 (format 0: codes two to a byte,
// E4M3 scales, one FP32 scale a matrix) or Q8_0 (format 1: int8 codes, FP16 scales, tensor scales of one). `finite` is
// set to 0 if a weight is not finite (the results are then of no use), else to 1.
STRATA_API int strata_quantise(int format, const void* weights, int type, long matrices, long rows, long columns,
                               void* codes, void* scales, float* tensor_scales, int* finite) {
    using namespace strata;
    if (format < 0 || format > 1 || type < 0 || type > 1 || matrices < 0 || rows < 1 || columns < 1)
        return fail(kBadArgument, "%ld matrices of %ld x %ld, type %d, to format %d", matrices, rows, columns, type, format);
    if (weights == nullptr || codes == nullptr || scales == nullptr || tensor_scales == nullptr || finite == nullptr)
        return fail(kBadArgument, "an address of the quantisation is null");
    const Source source{weights, type, rows, columns};
    std::atomic<int> bad{0};
    for (long m = 0; m < matrices; ++m) {
        std::atomic<unsigned> largest{0};
        int status = parallel(rows, kRowsPerSlice, [&](long begin, long end) {
            unsigned here = 0;
            for (long row = m * rows + begin; row < m * rows + end; ++row)
                for (long first = 0; first < columns; first += kQ8Width) {
                    float x[kQ8Width];
                    read_block(source.row(row), type, first, kQ8Width, columns, x);
                    here = std::max(here, largest_magnitude(x, kQ8Width));
                }
            for (unsigned seen = largest.load(); seen < here && !largest.compare_exchange_weak(seen, here);) {
            }
        });
        if (status != kOk) return status;
        if (largest.load() >= exact::kInfinity) bad.store(1);
        const float size = exact::float_of(largest.load());
        const float scale = format == 0 && size > 0.0f ? std::max(size / 2688.0f, 0x1p-126f) : 1.0f;
        tensor_scales[m] = scale;
        const long code_bytes = format == 0 ? (columns + 1) / 2 : columns;
        const long blocks = format == 0 ? (columns + 15) / 16 : (columns + 31) / 32;
        status = parallel(rows, kRowsPerSlice, [&](long begin, long end) {
            for (long row = m * rows + begin; row < m * rows + end; ++row) {
                auto* row_codes = static_cast<uint8_t*>(codes) + row * code_bytes;
                if (format == 0)
                    quantise_nvfp4_row(source.row(row), source, scale, row_codes,
                                       static_cast<uint8_t*>(scales) + row * blocks);
                else
                    quantise_q8_row(source.row(row), source, reinterpret_cast<int8_t*>(row_codes),
                                    static_cast<uint16_t*>(scales) + row * blocks);
            }
        });
        if (status != kOk) return status;
    }
    *finite = bad.load() == 0 ? 1 : 0;
    return kOk;
}

// Puts one matrix of `experts` experts where their blobs have it: codes [experts, rows, code_bytes] and scales [experts,
// rows, scale_bytes] (each of `unit` bytes) go to groups of 16 rows that start at `offset` of each blob, `group_stride`
// bytes apart. Padding is left as it is.
STRATA_API int strata_pack_matrix(const void* codes, const void* scales, void* blobs, long experts, long rows,
                                  long code_bytes, long scale_bytes, long unit, long blob_bytes, long offset,
                                  long group_stride, long superblocks, long superblock_codes, long superblock_bytes) {
    using namespace strata;
    if (codes == nullptr || scales == nullptr || blobs == nullptr || experts < 0 || rows < 1 || superblocks < 1)
        return fail(kBadArgument, "%ld experts of %ld rows and %ld superblocks to be packed", experts, rows, superblocks);
    const long groups = (rows + exact::kGroup - 1) / exact::kGroup;
    if (offset + (groups - 1) * group_stride + superblocks * superblock_bytes > blob_bytes || unit < 1)
        return fail(kBadArgument, "%ld groups do not fit a blob of %ld bytes", groups, blob_bytes);
    const Place place{static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
                      static_cast<uint8_t*>(blobs), rows, code_bytes, scale_bytes, blob_bytes, offset, group_stride,
                      superblocks, superblock_codes, superblock_bytes, unit};
    return parallel(experts * groups, 4, [&](long begin, long end) {
        for (long i = begin; i < end; ++i) pack_group(place, i / groups, i % groups);
    });
}
