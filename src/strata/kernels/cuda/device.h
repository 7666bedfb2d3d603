// What only a GPU has, in one place: inline PTX, memory order towards the host, the GPU's clock, streaming loads,
// launches that overlap. Each has a second form for the tests' emulation on the CPU (STRATA_EMULATED).
#pragma once

namespace strata {
namespace device {

#if defined(STRATA_EMULATED)

template <unsigned kSelector>
__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b) { return strata_emulated_prmt(a, b, kSelector); }

__device__ __forceinline__ float half_value(unsigned short bits) {
    const unsigned size = bits & 0x7FFFu, sign = (bits & 0x8000u) << 16;
    if (size >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (size & 0x3FFu) << 13);
    const float subnormal = static_cast<float>(size) * 0x1p-24f;
    return size >= 0x400u ? __uint_as_float(sign | ((size << 13) + (112u << 23)))
                          : __uint_as_float(sign | __float_as_uint(subnormal));
}

__device__ __forceinline__ uint4 load_once(const void* at) { return *static_cast<const uint4*>(at); }

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ float quotient(float a, float b) { return a / b; }

__device__ __forceinline__ void prefetch(const void*) {}
__device__ __forceinline__ void prefetch_run(const unsigned char* at, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i += 16) static_cast<void>(*static_cast<const volatile unsigned char*>(at + i));
}

__device__ __forceinline__ int dot_mixed(unsigned signed_bytes, unsigned unsigned_bytes, int c) {
    for (int i = 0; i < 32; i += 8)
        c += static_cast<signed char>(signed_bytes >> i) * static_cast<int>(unsigned_bytes >> i & 0xFFu);
    return c;
}

__device__ __forceinline__ uint2 load_pair_acquire(const unsigned* at) {
    const unsigned long long both = __atomic_load_n(reinterpret_cast<const unsigned long long*>(at), __ATOMIC_ACQUIRE);
    return make_uint2(static_cast<unsigned>(both), static_cast<unsigned>(both >> 32));
}
__device__ __forceinline__ unsigned load_relaxed(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
__device__ __forceinline__ void store_release(unsigned* at, unsigned value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

__device__ __forceinline__ unsigned hear(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
__device__ __forceinline__ void tell(unsigned* at, unsigned value) { store_release(at, value); }

__device__ __forceinline__ unsigned long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull + static_cast<unsigned long long>(now.tv_nsec);
}

__device__ __forceinline__ void pause() { emulated::pause(); }

__device__ __forceinline__ int held(int value) { return value; }

__device__ __forceinline__ void let_next_start() {}
__device__ __forceinline__ void wait_for_previous() { emulated::previous_ends(); }

#else

// A byte permute whose selector may also replicate a byte's sign (__byte_perm cannot).
template <unsigned kSelector>
__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b) {
    unsigned result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(kSelector));
    return result;
}

// The value of FP16 bits.
__device__ __forceinline__ float half_value(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// To about 2 units in the last place and in a few instructions, for gates and norms: what a dense row's kernel waits for is
// its own chain of instructions. The same bits on one card whatever runs beside it.
__device__ __forceinline__ float exponential(float x) { return __expf(x); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }

// The dot product of four signed bytes with four unsigned ones, added to c.
__device__ __forceinline__ int dot_mixed(unsigned signed_bytes, unsigned unsigned_bytes, int c) {
    int result;
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(signed_bytes), "r"(unsigned_bytes), "r"(c));
    return result;
}

// 16 bytes that are read once and written by no kernel: past the first-level cache, which keeps what is shared.
__device__ __forceinline__ uint4 load_once(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// Asks for the 128 bytes around `at`, which nobody waits for, to be brought to the second-level cache.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" : : "l"(at)); }

// The same for `bytes` from `at` on, both multiples of 16, by one thread.
__device__ __forceinline__ void prefetch_run(const unsigned char* at, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(at), "r"(bytes) : "memory");
#endif
}

// Words shared with the host (system scope).
__device__ __forceinline__ uint2 load_pair_acquire(const unsigned* at) {  // at: a multiple of 8
    unsigned long long both;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(at) : "memory");
    return make_uint2(static_cast<unsigned>(both), static_cast<unsigned>(both >> 32));
}
__device__ __forceinline__ unsigned load_relaxed(const unsigned* at) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(unsigned* at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

// Words in device memory that one block of a launch writes for the others.
__device__ __forceinline__ unsigned hear(const unsigned* at) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void tell(unsigned* at, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void pause() { __nanosleep(100); }

// A value that lies in a register from here on: what was worked out before a wait is not worked out again after it.
__device__ __forceinline__ int held(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Launches that overlap (programmatic dependent launch, sm_90 and newer; elsewhere nothing). The next kernel of the
// stream may start once every block has said so or ended; `wait_for_previous` returns when the kernel before is
// complete and its writes are seen. Without that launch attribute both do nothing.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#if defined(STRATA_STAMPED)
// Of a file, for a profile: when the first block of each of its launches went on, in nanoseconds.
extern "C" __device__ unsigned stamp_count = 0;
extern "C" __device__ unsigned long long stamps[1 << 12] = {};
#endif
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
#if defined(STRATA_STAMPED)
    if (threadIdx.x != 0 || (blockIdx.x | blockIdx.y | blockIdx.z) != 0) return;
    const unsigned long long now = nanoseconds();
    const unsigned number = atomicAdd(&stamp_count, 1u);
    if (number < sizeof(stamps) / sizeof(stamps[0])) stamps[number] = now;
#endif
}

#endif

// Weights of launches to come, which this one brings to the second-level cache while it waits for other things: memory
// would idle else. What is brought changes no result. `at` and `bytes` are multiples of 16.
struct Ahead {
    const unsigned char* at[4];
    unsigned bytes[4], run[4];  // run: of one block
};

// By all blocks of a launch, before they wait. One thread asks for each part, of a block's last warp: the instruction takes
// one thread at a time. Before sm_90, which has it not, all threads ask for a line each.
__device__ __forceinline__ void bring(const Ahead& ahead) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const unsigned first = block * ahead.run[part], last = min(first + ahead.run[part], ahead.bytes[part]);
        for (unsigned at = first + threadIdx.x * 128; at < last; at += blockDim.x * 128) prefetch(ahead.at[part] + at);
    }
#else
    const int part = static_cast<int>(blockDim.x) - 1 - static_cast<int>(threadIdx.x);
    if (part >= 4) return;
    // Indexed by constants alone: an array of arguments would be copied else.
    const unsigned bytes = part == 0 ? ahead.bytes[0] : part == 1 ? ahead.bytes[1] : part == 2 ? ahead.bytes[2] : ahead.bytes[3];
    const unsigned run = part == 0 ? ahead.run[0] : part == 1 ? ahead.run[1] : part == 2 ? ahead.run[2] : ahead.run[3];
    const unsigned char* at = part == 0 ? ahead.at[0] : part == 1 ? ahead.at[1] : part == 2 ? ahead.at[2] : ahead.at[3];
    const unsigned first = block * run;
    if (first < bytes) prefetch_run(at + first, min(run, bytes - first));
#endif
}

// BF16 bits, either half of a word.
__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

}  // namespace device
}  // namespace strata
