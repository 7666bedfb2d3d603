// Routed experts on an NVIDIA GPU in the exact arithmetic: the same bits as the CPU's kernels, from the same blobs,
// wherever an address points (a slot in VRAM or the alias of page-locked RAM). Compiled at run time by NVRTC. No fast
// math; no contraction (--fmad=false), fused multiply-adds are explicit.
#include "exact.h"
#include "device.h"
#include "expert_work.h"
#include "parts.h"

using namespace strata::experts;
namespace device = strata::device;

struct __align__(16) Task {  // as in csrc/cpu/expert.h
    unsigned long long blob;
    float scales[3];
    int first, count, row;  // row: rows[first]
};

struct Shape {
    int hidden, intermediate;
    int wide, narrow;  // superblocks of a row of gate and up, of down
    int pairs;         // of groups of down that a block computes
};

// Codes and scale of 16 values held by 16 neighbouring lanes. Returns whether all are finite.
__device__ __forceinline__ bool quantise_lanes(float x, unsigned lanes, signed char* code, float* scale, bool write) {
    unsigned largest = magnitude(x);
    for (int step = 8; step > 0; step >>= 1) {
        const unsigned other = __shfl_xor_sync(lanes, largest, step);
        largest = other > largest ? other : largest;
    }
    const GroupScale group = group_scale(largest);
    if (write) {
        *code = static_cast<signed char>(group.scale != 0.0f ? nearest(product(x, group.inverse)) : 0);
        *scale = group.scale;
    }
    return group.finite;
}

#if STRATA_IN(0)
// Rows of x [T, hidden] to codes [T, padded] and scales [T, padded / 16], padded a multiple of 64. One block a row.
extern "C" __global__ void quantise_rows(const float* x, int hidden, int padded, signed char* codes, float* scales,
                                         unsigned char* flags) {
    device::let_next_start();
    device::wait_for_previous();
    const long long row = blockIdx.x;
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {  // blockDim is a multiple of 32, padded of 64
        const float value = i < hidden ? x[row * hidden + i] : 0.0f;
        if (!quantise_lanes(value, kAll, codes + row * padded + i, scales + (row * padded + i) / 16, true))
            flags[row] = 1;
    }
}
#endif

// silu(gate) * up of a column, gate in lanes 0..15, up in lanes 16..31; the result is in both. Columns of padding are
// zero, whatever its bytes are.
__device__ __forceinline__ float gated(const Shape& shape, float total) {
    const float other = __shfl_xor_sync(kAll, total, 16);
    const bool is_gate = (threadIdx.x & 16) == 0;
    const float h = product(silu(is_gate ? total : other), is_gate ? other : total);
    return static_cast<int>(blockIdx.x * 16 + (threadIdx.x & 15)) < shape.intermediate ? h : 0.0f;
}

// The block's task. Returns whether there is one.
__device__ __forceinline__ bool read_task(const Task* tasks, const int* num_tasks, Task& task) {
    // All reads are under way at once, before it is known that there is such a task.
    const uint4 *from = reinterpret_cast<const uint4*>(tasks + blockIdx.y);
    const uint4 first = load_now(from), second = load_now(from + 1);
    const int number = num_tasks != nullptr ? *num_tasks : static_cast<int>(gridDim.y);
    task.blob = static_cast<unsigned long long>(first.y) << 32 | first.x;
    task.scales[0] = float_of(first.z);
    task.scales[1] = float_of(first.w);
    task.scales[2] = float_of(second.x);
    task.first = static_cast<int>(second.y);
    task.count = static_cast<int>(second.z);
    task.row = static_cast<int>(second.w);
    return static_cast<int>(blockIdx.y) < number;
}

template <class Format>
__device__ __forceinline__ Work gate_up_work(const Shape& shape, const Task& task) {
    const long long bytes = static_cast<long long>(shape.wide) * Format::kBytes;
    return {reinterpret_cast<const unsigned char*>(task.blob) + blockIdx.x * 2 * bytes, shape.wide,
            (shape.hidden + 15) / 16, 1, 2, warp_number(), static_cast<int>(blockDim.x >> 5)};
}

template <class Format>
__device__ __forceinline__ Work down_work(const Shape& shape, const Task& task) {
    const long long wide = static_cast<long long>(shape.wide) * Format::kBytes;
    const long long narrow = static_cast<long long>(shape.narrow) * Format::kBytes;
    const int first = blockIdx.x * shape.pairs, groups = (shape.hidden + 15) / 16 - first * 2;
    return {reinterpret_cast<const unsigned char*>(task.blob) + 2 * ((shape.intermediate + 15) / 16) * wide +
                first * 2 * narrow,
            shape.narrow, (shape.intermediate + 15) / 16, min(shape.pairs, (groups + 1) / 2), groups, warp_number(),
            static_cast<int>(blockDim.x >> 5)};
}

template <class Format, int R>
__device__ __forceinline__ void gate_up_rows(const Shape& shape, const Task& task, const Work& work,
                                             Pipe<Format>& pipe, const Room& room, int first, int rows,
                                             const int* row_of, signed char* inner, float* inner_scales,
                                             unsigned char* flags) {
    multiply<Format, R>(work, pipe, room, rows);
    const int lane = threadIdx.x & 31;
    for (int r = work.warp; r < rows; r += work.warps) {
        const float total = total_of<R>(room.sums, work.segments(), 0, r);
        const float h = gated(shape, product(total, Format::unit(lane < 16 ? task.scales[0] : task.scales[1])));
        const long long pick = task.first + first + r;
        signed char* code = inner + pick * shape.narrow * 64 + blockIdx.x * 16 + (lane & 15);
        float* scale = inner_scales + pick * shape.narrow * 4 + blockIdx.x;
        if (!quantise_lanes(h, kAll, code, scale, lane < 16)) flags[row_of[pick]] = 1;
    }
}

template <class Format>
__device__ __forceinline__ void gate_up(const Shape& shape, const Task* tasks, const int* row_of, const signed char* x,
                                        const float* x_scales, signed char* inner, float* inner_scales,
                                        unsigned char* flags, const int* num_tasks) {
    extern __shared__ uint4 memory[];
    Task task;
    device::wait_for_previous();
    device::let_next_start();  // not before: down reads the tasks when it starts
    if (!read_task(tasks, num_tasks, task)) return;
    const Work work = gate_up_work<Format>(shape, task);
    const Room room(memory, shape.wide);
    Pipe<Format> pipe(work);
    for (int first = 0; first < task.count; first += kRows) {
        pipe.begin(work);
        const int rows = min(kRows, task.count - first);
        int lines[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            lines[r] = first + r == 0 ? task.row : r < rows ? row_of[task.first + first + r] : 0;
        stage_zeros(memory);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            if (r < rows)
                stage(room, shape.wide, r, x + static_cast<long long>(lines[r]) * shape.wide * 64,
                      x_scales + static_cast<long long>(lines[r]) * shape.wide * 4);
        __syncthreads();
        if (rows == 1)
            gate_up_rows<Format, 1>(shape, task, work, pipe, room, first, rows, row_of, inner, inner_scales, flags);
        else if (rows == 2)
            gate_up_rows<Format, 2>(shape, task, work, pipe, room, first, rows, row_of, inner, inner_scales, flags);
        else
            gate_up_rows<Format, 4>(shape, task, work, pipe, room, first, rows, row_of, inner, inner_scales, flags);
        if (first + kRows < task.count) __syncthreads();
    }
}

// Writes the products of a block of down; `slot_of` [kRows] is in shared memory.
template <int R>
__device__ __forceinline__ void write_down(const Shape& shape, const Task& task, const Work& work, const float* sums,
                                           float unit, int first, int rows, const int* row_of, const int* slot_of,
                                           float* out, unsigned char* flags) {
    for (int u = work.warp; u < work.pairs * R; u += work.warps) {
        const int pair = u / R, r = u % R;
        const int column = (blockIdx.x * shape.pairs + pair) * 32 + (threadIdx.x & 31);
        if (r >= rows || column >= shape.hidden) continue;
        const float y = product(total_of<R>(sums, work.segments(), pair, r), unit);
        const bool finite = is_finite(y);
        out[static_cast<long long>(slot_of[r]) * shape.hidden + column] = finite ? y : 0.0f;
        if (!finite) flags[row_of[task.first + first + r]] = 1;
    }
}

// Must be the launch after gate and up. It reads its task and asks for its first weights while they are computed, which
// it may because they let it start only when the launch before them, which wrote the tasks, is complete.
template <class Format>
__device__ __forceinline__ void down(const Shape& shape, const Task* tasks, const int* row_of, const int* slots,
                                     const signed char* inner, const float* inner_scales, float* out,
                                     unsigned char* flags, const int* num_tasks) {
    extern __shared__ uint4 memory[];
    __shared__ int slot_of[kRows];
    Task task;
    device::let_next_start();
    if (!read_task(tasks, num_tasks, task)) {
        device::wait_for_previous();
        return;
    }
    const Work work = down_work<Format>(shape, task);
    const Room room(memory, shape.narrow);
    Pipe<Format> pipe(work);
    for (int first = 0; first < task.count; first += kRows) {
        pipe.begin(work);
        if (first == 0) device::wait_for_previous();
        const int rows = min(kRows, task.count - first);
        stage_zeros(memory);
        if (threadIdx.x < rows) slot_of[threadIdx.x] = slots[task.first + first + threadIdx.x];
        for (int r = 0; r < rows; ++r) {
            const long long pick = task.first + first + r;
            stage(room, shape.narrow, r, inner + pick * shape.narrow * 64, inner_scales + pick * shape.narrow * 4);
        }
        __syncthreads();
        const float unit = Format::unit(task.scales[2]);
        if (rows == 1) {
            multiply<Format, 1>(work, pipe, room, rows);
            write_down<1>(shape, task, work, room.sums, unit, first, rows, row_of, slot_of, out, flags);
        } else if (rows == 2) {
            multiply<Format, 2>(work, pipe, room, rows);
            write_down<2>(shape, task, work, room.sums, unit, first, rows, row_of, slot_of, out, flags);
        } else {
            multiply<Format, 4>(work, pipe, room, rows);
            write_down<4>(shape, task, work, room.sums, unit, first, rows, row_of, slot_of, out, flags);
        }
        if (first + kRows < task.count) __syncthreads();
    }
}

// Grid: experts.py, `gate_up_launch` and `down_launch`; y is the task. `inner` and `inner_scales` are zero where the
// intermediate width is padded (the caller clears them once). `num_tasks`, if not null, holds how many of the grid's
// tasks there are; memory of the others may hold anything.
#define STRATA_EXPERT_KERNELS(NAME, FORMAT)                                                                           \
    extern "C" __global__ void __launch_bounds__(320, 2)                                                              \
        NAME##_gate_up(Shape shape, const Task* tasks, const int* rows, const signed char* x, const float* x_scales,  \
                       signed char* inner, float* inner_scales, unsigned char* flags, const int* num_tasks) {         \
        gate_up<FORMAT>(shape, tasks, rows, x, x_scales, inner, inner_scales, flags, num_tasks);                      \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(320, 2)                                                              \
        NAME##_down(Shape shape, const Task* tasks, const int* rows, const int* slots, const signed char* inner,      \
                    const float* inner_scales, float* out, unsigned char* flags, const int* num_tasks) {              \
        down<FORMAT>(shape, tasks, rows, slots, inner, inner_scales, out, flags, num_tasks);                          \
    }

#if STRATA_IN(1)
STRATA_EXPERT_KERNELS(nvfp4, Nvfp4)
#endif
#if STRATA_IN(0)
STRATA_EXPERT_KERNELS(q8_0, Q8)
#endif

// BF16 experts: activations stay FP32 and every weight is one fused multiply-add, in order. A lane has a row of a pair;
// the weights of a superblock are under way at once. `width`: of x; weights behind it become zeros, whatever they are.
struct Bf16 {
    static constexpr int kBytes = 2048;
};

template <int R>
__device__ __forceinline__ void multiply_bf16(const Work& work, const float* const* x, int width, float* sums) {
    const int lane = threadIdx.x & 31;
    Place now(work);
    for (int unit = work.warp; now.pair < work.pairs; unit += work.warps) {
        const int group = min(now.pair * 2 + (lane >> 4), work.groups - 1);
        float acc[R];
#pragma unroll
        for (int r = 0; r < R; ++r) acc[r] = 0.0f;
        for (int s = now.segment * 2; s < now.segment * 2 + 2 && s < work.superblocks; ++s) {
            const unsigned char* p = work.weights + (lane & 15) * 4 +
                                     (static_cast<long long>(group) * work.superblocks + s) * Bf16::kBytes;
            unsigned words[32];
#pragma unroll
            for (int pair = 0; pair < 32; ++pair) words[pair] = load_word_once(p + pair * 64);
            const int left = width - s * kSuperblock;
            if (left < kSuperblock) {
#pragma unroll
                for (int pair = 0; pair < 32; ++pair)
                    words[pair] &= pair * 2 + 1 < left ? kAll : pair * 2 < left ? 0xFFFFu : 0u;
            }
#pragma unroll
            for (int pair = 0; pair < 32; ++pair) {
                const int at = s * kSuperblock + pair * 2;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    acc[r] = fused(device::bf16_low(words[pair]), at < width ? x[r][at] : 0.0f, acc[r]);
                    acc[r] = fused(device::bf16_high(words[pair]), at + 1 < width ? x[r][at + 1] : 0.0f, acc[r]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) sums[(unit * R + r) * 32 + lane] = acc[r];
        now.advance(work);
    }
    __syncthreads();
}

template <int R>
__device__ void gate_up_rows_bf16(const Shape& shape, const Task& task, int first, const int* row_of, const float* x,
                                  float* inner, unsigned char* flags, float* sums) {
    const float* picked[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const long long row = first + r == 0 ? task.row : row_of[task.first + first + r];
        picked[r] = x + row * shape.hidden;
    }
    const Work work = gate_up_work<Bf16>(shape, task);
    multiply_bf16<R>(work, picked, shape.hidden, sums);
    const int lane = threadIdx.x & 31;
    for (int r = work.warp; r < R; r += work.warps) {
        const float unit = lane < 16 ? task.scales[0] : task.scales[1];
        const float h = gated(shape, product(total_of<R>(sums, work.segments(), 0, r), unit));
        const long long pick = task.first + first + r;
        if (lane < 16) inner[pick * shape.narrow * kSuperblock + blockIdx.x * 16 + lane] = h;
        if (!is_finite(h)) flags[row_of[pick]] = 1;
    }
    __syncthreads();
}

template <int R>
__device__ void down_rows_bf16(const Shape& shape, const Task& task, int first, const int* row_of, const int* slots,
                               const float* inner, float* out, unsigned char* flags, float* sums) {
    const float* picked[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
        picked[r] = inner + static_cast<long long>(task.first + first + r) * shape.narrow * kSuperblock;
    const Work work = down_work<Bf16>(shape, task);
    multiply_bf16<R>(work, picked, shape.intermediate, sums);
    write_down<R>(shape, task, work, sums, task.scales[2], first, R, row_of, slots + task.first + first, out, flags);
    __syncthreads();
}

#if STRATA_IN(0)
// As the kernels above. `x` FP32 [rows, hidden], `inner` FP32 [picks, narrow * 64], zero where the width is padded.
extern "C" __global__ void __launch_bounds__(320, 2)
    bf16_gate_up(Shape shape, const Task* tasks, const int* rows, const float* x, float* inner, unsigned char* flags,
                 const int* num_tasks) {
    extern __shared__ float room[];
    Task task;
    device::wait_for_previous();
    device::let_next_start();
    if (!read_task(tasks, num_tasks, task)) return;
    int first = 0;
    for (; first + kRows <= task.count; first += kRows)
        gate_up_rows_bf16<kRows>(shape, task, first, rows, x, inner, flags, room);
    for (; first < task.count; ++first) gate_up_rows_bf16<1>(shape, task, first, rows, x, inner, flags, room);
}

extern "C" __global__ void __launch_bounds__(320, 2)
    bf16_down(Shape shape, const Task* tasks, const int* rows, const int* slots, const float* inner, float* out,
              unsigned char* flags, const int* num_tasks) {
    extern __shared__ float room[];
    Task task;
    device::wait_for_previous();
    device::let_next_start();
    if (!read_task(tasks, num_tasks, task)) return;
    int first = 0;
    for (; first + kRows <= task.count; first += kRows)
        down_rows_bf16<kRows>(shape, task, first, rows, slots, inner, out, flags, room);
    for (; first < task.count; ++first) down_rows_bf16<1>(shape, task, first, rows, slots, inner, out, flags, room);
}

// y[row] = sum over k, in order, by fused multiply-add from zero, of weights[row, k] * parts[row, k]. Grid (rows,
// blocks).
extern "C" __global__ void combine_parts(const float* parts, const float* weights, int k, int hidden, float* y,
                                         unsigned char* flags) {
    device::let_next_start();
    device::wait_for_previous();
    const long long row = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= hidden) return;
    float total = 0.0f;
    for (int part = 0; part < k; ++part)
        total = fused(weights[row * k + part], parts[(row * k + part) * hidden + i], total);
    const bool finite = is_finite(total);
    y[row * hidden + i] = finite ? total : 0.0f;
    if (!finite) flags[row] = 1;
}
#endif
