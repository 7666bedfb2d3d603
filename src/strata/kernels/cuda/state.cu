// A sequence's state in device memory: rows are written where the committed position says, which is read from memory, so
// that one recorded round serves every position. Compiled at run time by NVRTC.
#include "device.h"

using namespace strata;

// The nearest BF16, ties to even; NaN stays NaN.
__device__ __forceinline__ unsigned short to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<unsigned short>(bits >> 16 | 0x40u);
    return static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// Keys and values of T rows to a cache [positions, width], FP32 or BF16. Grid (rows, 2): 0 keys, 1 values.
extern "C" __global__ void append_rows(const float* keys, const float* values, void* key_cache, void* value_cache,
                                       int width, int bf16, const int* position) {
    device::let_next_start();
    device::wait_for_previous();
    const long long to = (static_cast<long long>(position[0]) + blockIdx.x) * width;
    const float* from = (blockIdx.y == 0 ? keys : values) + static_cast<long long>(blockIdx.x) * width;
    void* cache = blockIdx.y == 0 ? key_cache : value_cache;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        if (bf16)
            reinterpret_cast<unsigned short*>(cache)[to + i] = to_bf16(from[i]);
        else
            reinterpret_cast<float*>(cache)[to + i] = from[i];
    }
}

// Raw index keys of T rows to their cache, and the raw keys of the blocks that these rows may complete: candidate b is
// block position / block + b. Rows not yet written read as zero. Grid (rows + candidates).
extern "C" __global__ void append_index(const float* raw, float* cache, float* candidates, int rows, int width, int block,
                                        const int* position) {
    device::let_next_start();
    device::wait_for_previous();
    const int start = position[0];
    if (blockIdx.x < rows) {
        const long long to = (static_cast<long long>(start) + blockIdx.x) * width;
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            cache[to + i] = raw[static_cast<long long>(blockIdx.x) * width + i];
        return;
    }
    const int candidate = blockIdx.x - rows;
    const int first = (start / block + candidate) * block;
    for (int i = threadIdx.x; i < width * block; i += blockDim.x) {
        const int at = first + i / width, column = i % width;
        float value = 0.0f;
        if (at < start)
            value = cache[static_cast<long long>(at) * width + column];
        else if (at < start + rows)
            value = raw[static_cast<long long>(at - start) * width + column];
        candidates[static_cast<long long>(candidate) * block * width + i] = value;
    }
}

// The finished keys of the candidates that are complete now. Grid (candidates).
extern "C" __global__ void finish_index(const float* keys, float* cache, int rows, int width, int block,
                                        const int* position) {
    device::let_next_start();
    device::wait_for_previous();
    const int start = position[0], number = start / block + blockIdx.x;
    if ((number + 1) * block > start + rows) return;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        cache[static_cast<long long>(number) * width + i] = keys[static_cast<long long>(blockIdx.x) * width + i];
}

// Floats of the host's, which no launch writes, so that they are on their way before the launch before is complete.
extern "C" __global__ void copy_in(const float* from, int count, float* to) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    device::let_next_start();
    const float value = i < count ? from[i] : 0.0f;
    device::wait_for_previous();
    if (i < count) to[i] = value;
}

// Cosines and sines of positions: of T rows from the committed position, or (block > 0) of the first positions of the
// blocks from the one that holds it. Positions behind the table's end read its last row. Grid (rows).
extern "C" __global__ void rotary_rows(const float* cos_table, const float* sin_table, int half, int positions, int block,
                                       float* cos_rows, float* sin_rows, const int* position) {
    device::let_next_start();
    device::wait_for_previous();
    const int start = position[0];
    int at = block > 0 ? (start / block + static_cast<int>(blockIdx.x)) * block : start + static_cast<int>(blockIdx.x);
    at = at < positions ? at : positions - 1;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        cos_rows[blockIdx.x * half + i] = cos_table[static_cast<long long>(at) * half + i];
        sin_rows[blockIdx.x * half + i] = sin_table[static_cast<long long>(at) * half + i];
    }
}
