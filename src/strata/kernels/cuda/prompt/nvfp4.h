// NVFP4 weights as BF16 numbers in registers, exact but for a power of two.
#pragma once
#include "tensor.h"

namespace strata {
namespace nvfp4 {

// 2^118 times an E4M3 number, in both halves.
__device__ __forceinline__ unsigned scale(unsigned code) {
    const float large = __uint_as_float(239u << 23);
    const float value = code >= 8 ? __uint_as_float((code << 20) + (238u << 23))
                                  : __uint_as_float((code << 20) + (239u << 23)) - large;
    const unsigned bits = __float_as_uint(value) >> 16;
    return bits | bits << 16;
}

// Two neighbouring codes of byte i as BF16 numbers of 2^-126 times their values.
template <int i>
__device__ __forceinline__ unsigned pair(unsigned word, unsigned shifted) {
    const unsigned both = device::prmt<(i << 12 | (4 + i) << 4)>(word, shifted);
    return (both & 0x80008000u) | (both & 0x70007000u) >> 6;
}

}  // namespace nvfp4
}  // namespace strata
