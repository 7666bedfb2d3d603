// Products of 1 to 8 rows with dense weights (q8_0, BF16, FP32): several matrices over the same rows in one launch, and
// the embedding. Bound by reading the weights once: bytes = O x I x (1.0625, 2 or 4).
#include "parts.h"
#include "products.h"

using namespace strata;
using namespace strata::rows;

// T rows, R rows of weights a warp, kAhead steps under way: linear_ops.py's `_plan` knows threads and blocks.
#define STRATA_LINEARS(T, R, AHEAD, THREADS, BLOCKS, KIND, NAME)                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                            \
        linears_##T##x##R##NAME(const Activations a, const Matrices all, const device::Ahead ahead) {        \
        extern __shared__ float4 room[];                                                                     \
        device::let_next_start();                                                                            \
        device::bring(ahead);                                                                                \
        linears<T, R, AHEAD, KIND>(a, all, blockIdx.x, gridDim.x, room);                                     \
    }

#if STRATA_IN(0)
STRATA_LINEARS(8, 4, 3, 256, 1, kAny, _any)
#endif
#if STRATA_IN(1)
STRATA_LINEARS(2, 2, 5, 256, 2, kAsIs, )
STRATA_LINEARS(2, 2, 5, 256, 2, kAny, _any)
#endif
#if STRATA_IN(2)
STRATA_LINEARS(1, 1, 10, 320, 2, kAsIs, )
STRATA_LINEARS(1, 2, 5, 256, 2, kAsIs, )
#endif
#if STRATA_IN(3)
STRATA_LINEARS(1, 1, 8, 320, 2, kAny, _any)
STRATA_LINEARS(1, 2, 5, 256, 2, kAny, _any)
#endif
#if STRATA_IN(4)
STRATA_LINEARS(4, 4, 3, 256, 1, kAny, _any)

// y[t] = row ids[t] of the table as FP32, one block a row of the window. Ids outside are those of the nearest row.
extern "C" __global__ void embedding(Inputs inputs, const unsigned char* data, const unsigned short* scales, int format,
                                     int vocabulary, int columns, int row_bytes, float* y) {
    device::wait_for_previous();
    const int t = blockIdx.x;
    const long long id = max(0, min(inputs.ids[t], vocabulary - 1));
    const unsigned char* row = data + id * row_bytes;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value;
        if (format == kQ8)
            value = static_cast<float>(reinterpret_cast<const signed char*>(row)[i]) *
                    device::half_value(scales[id * (row_bytes / 32) + i / 32]);
        else if (format == kBf16)
            value = device::bf16_low(reinterpret_cast<const unsigned short*>(row)[i]);
        else
            value = reinterpret_cast<const float*>(row)[i];
        y[static_cast<long long>(t) * columns + i] = value;
    }
}
#endif
