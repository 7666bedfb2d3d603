// NVFP4 experts as BF16 matrices, 2^-8 of their values, for products by a library. Measured by benchmarks/prompt_card.py
// against expert_prompt.cu, which serves; decision record 0136.
#include "nvfp4.h"

namespace {

constexpr int kSuperblock = 576;
constexpr int kGroup = 16;

}  // namespace

// out[expert][group * 16 + row][superblock * 64 + k]. A thread has the 16 weights of a scale. Grid (parts of an expert,
// experts); `before`: bytes of a blob before the matrix; `units`: groups * superblocks.
extern "C" __global__ void expand_nvfp4(const unsigned long long* address, int before, int units, int superblocks,
                                        unsigned short* out) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, unit = index >> 6, t = index & 3, row = index >> 2 & 15;
    if (unit >= units) return;
    const auto* block = reinterpret_cast<const unsigned char*>(address[blockIdx.y]) + before +
                        static_cast<long long>(unit) * kSuperblock;
    const unsigned scale = strata::nvfp4::scale(block[512 + t * kGroup + row]);
    const int group = unit / superblocks, at = unit - group * superblocks;
    const long long width = superblocks * 64LL, rows = static_cast<long long>(units / superblocks) * kGroup;
    auto* to = reinterpret_cast<uint4*>(out + (blockIdx.y * rows + group * kGroup + row) * width + at * 64 + t * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned codes = *reinterpret_cast<const unsigned*>(block + ((t * 2 + half) * kGroup + row) * 4);
        to[half] = make_uint4(strata::tensor::scaled(strata::nvfp4::pair<0>(codes, codes << 4), scale),
                              strata::tensor::scaled(strata::nvfp4::pair<1>(codes, codes << 4), scale),
                              strata::tensor::scaled(strata::nvfp4::pair<2>(codes, codes << 4), scale),
                              strata::tensor::scaled(strata::nvfp4::pair<3>(codes, codes << 4), scale));
    }
}
