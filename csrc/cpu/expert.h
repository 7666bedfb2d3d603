// Routed experts on the CPU: the shape of a blob, prepared rows, and one table of kernels a level and format.
//
// A prepared row is a row as kernels read it: for NVFP4 and Q8_0 groups of 16 codes, in the order in which blobs hold
// weights, with their scale and correction; for BF16 the FP32 values. Widths are padded to 64 with zeros.
// This header is shared by the driver (expert.cpp), those that list tasks, and the kernels of every level; it must not
// know Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exact.h"
#include "isa.h"

// One expert and its picks [first, first + count); scales of gate, up and down. Laid out for numpy.
struct StrataExpertTask {
    uint64_t blob;
    float scales[3];
    int32_t first, count;
    int32_t row;  // of x, of the first pick; only a GPU reads it
};
static_assert(sizeof(StrataExpertTask) == 32, "the Python side describes these bytes");

// Computes `num_tasks` experts for `picks` (row, result) pairs: result slots[i] (of `hidden` floats) of `out` becomes
// the expert of row rows[i] of x, x_rows rows of `hidden` floats. flags[row] is set to 1 if the row held, or led to,
// a number that is not finite; others are left. No two picks may share a result. Splits the work over the pool.
STRATA_API int strata_expert_compute(long hidden, long intermediate, int format, const StrataExpertTask* tasks,
                                     long num_tasks, const int32_t* rows, const int32_t* slots, long picks,
                                     const float* x, long x_rows, float* out, long out_slots, uint8_t* flags);

namespace strata {

enum ExpertFormat : int { kNvfp4 = 0, kQ8 = 1, kBf16 = 2, kExpertFormats = 3 };

struct ExpertShape {
    long hidden, intermediate;
    int format;

    static long up_to(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }
    long superblock_bytes() const { return format == kNvfp4 ? 576 : format == kQ8 ? 1088 : 2048; }
    long hidden_superblocks() const { return up_to(hidden, exact::kSuperblock) / exact::kSuperblock; }
    long inner_superblocks() const { return up_to(intermediate, exact::kSuperblock) / exact::kSuperblock; }
    long inner_groups() const { return up_to(intermediate, exact::kGroup) / exact::kGroup; }
    long hidden_groups() const { return up_to(hidden, exact::kGroup) / exact::kGroup; }
    // Bytes of a group of 16 rows of gate or up, and of down.
    long wide_bytes() const { return hidden_superblocks() * superblock_bytes(); }
    long narrow_bytes() const { return inner_superblocks() * superblock_bytes(); }
    long down_offset() const { return 2 * inner_groups() * wide_bytes(); }
    long payload_bytes() const { return down_offset() + hidden_groups() * narrow_bytes(); }
    // Bytes of a prepared row of that many superblocks.
    long row_bytes(long superblocks) const { return superblocks * exact::kSuperblock * (format == kBf16 ? 8 : 3) / 2; }
};

// Sixteen activations of a prepared row of NVFP4 or Q8_0: all that a block of weights needs lies together, so that
// a kernel holds one address a row.
struct CodedGroup {
    int8_t codes[exact::kGroup];
    float scale;
    int32_t correction;
};

struct ExpertKernels {
    // Prepares one row of `width` values; `row` holds row_bytes(superblocks). Returns 1 if a value is not finite.
    int (*prepare)(const float* x, long width, long superblocks, void* row);

    // Groups [begin, end) of gate and up for `count` prepared rows x: silu(gate) * up goes to the prepared rows h.
    // Sets flags[i] where a result is not finite.
    void (*gate_up)(const ExpertShape& shape, const uint8_t* blob, float gate_scale, float up_scale, long begin,
                    long end, const void* const* x, void* const* h, long count, uint8_t* const* flags);

    // Groups [begin, end) of down for `count` prepared rows h: `hidden` floats at y[i]. Sets flags likewise.
    void (*down)(const ExpertShape& shape, const uint8_t* blob, float scale, long begin, long end,
                 const void* const* h, float* const* y, long count, uint8_t* const* flags);

    // y[i] = sum over k, in order, by fused multiply-add from zero, of weights[k] * parts[k][i]. Returns 1 if a
    // result is not finite (it is then 0).
    int (*combine)(const float* const* parts, const float* weights, long k, long width, float* y);

    // The sum of 64-bit words: the plainest reading of memory, the ceiling that kernels are measured against.
    uint64_t (*add_words)(const uint64_t* words, long count);

    // Rows that one reading of the weights serves, that one step over decoded weights takes, and that the results of one
    // decoding are kept for.
    long rows_at_once, panel_rows, most_rows;
};

// Tables of the levels that were built in; null elsewhere.
const ExpertKernels* expert_kernels_scalar(int format);
const ExpertKernels* expert_kernels_avx2(int format);
const ExpertKernels* expert_kernels_avxvnni(int format);
const ExpertKernels* expert_kernels_avx512(int format);

}  // namespace strata
