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

__device__ __forceinline__ unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
__device__ __forceinline__ unsigned load_relaxed(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
__device__ __forceinline__ void store_release(unsigned* at, unsigned value) {
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

__device__ __forceinline__ unsigned long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<unsigned long long>(now.tv_sec) * 1000000000ull + static_cast<unsigned long long>(now.tv_nsec);
}

__device__ __forceinline__ void pause() { emulated::pause(); }

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

// 16 bytes that are read once and written by no kernel: past the first-level cache, which keeps what is shared.
__device__ __forceinline__ uint4 load_once(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// Words shared with the host (system scope).
__device__ __forceinline__ unsigned load_acquire(const unsigned* at) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ unsigned load_relaxed(const unsigned* at) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(unsigned* at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void pause() { __nanosleep(100); }

// Launches that overlap (programmatic dependent launch, sm_90 and newer; elsewhere nothing). The next kernel of the
// stream may start once every block has said so or ended; `wait_for_previous` returns when the kernel before is
// complete and its writes are seen. Without that launch attribute both do nothing.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

#endif

// BF16 bits, either half of a word.
__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

}  // namespace device
}  // namespace strata
