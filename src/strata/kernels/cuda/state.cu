// A sequence's state in device memory: rows are written where the committed position says, which is read from memory, so
// that one recorded round serves every position. Compiled at run time by NVRTC.
#include "device.h"

using namespace strata;

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
