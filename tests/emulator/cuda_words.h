// CUDA's words for g++, so that a .cu file of ours runs on the CPU. Every thread of a block is a fiber; fibers take
// turns at barriers and warp operations, and blocks run to their end one after another. So a kernel may wait for the
// host or for blocks before its own, never for a later block. Memory is the process's own; float operations are the
// CPU's with the same roundings (-ffp-contract=off), library functions such as expf are the C library's.
//
// Errors, each ending the launch with a sentence: a barrier or a warp operation that not all of its threads reach, a
// lane that does not exist, a write past the dynamic shared memory. Shared memory starts as 0xFF bytes (NaN, -1).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <sched.h>
#include <sys/mman.h>
#include <tuple>
#include <type_traits>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define STRATA_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint3 { unsigned x, y, z; };
typedef uint3 dim3;
struct alignas(4) char4 { signed char x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
struct alignas(4) ushort2 { unsigned short x, y; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

namespace emulated {

constexpr int kThreads = 1024, kStack = 64 << 10, kShared = 256 << 10, kGuard = 256, kRegions = 256;
enum State { kReady, kAtBarrier, kInWarp, kDone };
enum Operation { kShuffle, kBallot, kSync };

struct Fiber {
    void* sp;
    State state;
    bool paused;
    unsigned mask;  // of the warp operation it waits in
    Operation operation;
    int source;
    uint64_t value, result;
};

struct Region {
    void* data;
    size_t bytes;
};

static Fiber fibers[kThreads];
static char* stacks;
static void* scheduler;
static int threads, current, arrived, barrier_count, barrier_total;
static void (*body)(void*);
static void* body_context;
static char message[512];
static bool failed, backward;
static Region regions[kRegions];
static int num_regions;
alignas(256) static unsigned char dynamic[kShared + kGuard];

#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void strata_emulated_switch(void** save, void* load);
asm(R"(
.text
.hidden strata_emulated_switch
.globl strata_emulated_switch
.type strata_emulated_switch, @function
strata_emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static inline void switch_to(void** save, void* load) { strata_emulated_switch(save, load); }
static void* new_fiber(int index, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(stacks + static_cast<size_t>(index + 1) * kStack);
    *--top = nullptr;  // entry never returns; this keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    return top;
}
#else
static ucontext_t contexts[kThreads], scheduler_context;
static inline void switch_to(void** save, void* load) {
    auto* from = save == &scheduler ? &scheduler_context : &contexts[(reinterpret_cast<Fiber*>(save)) - fibers];
    auto* to = save == &scheduler ? static_cast<ucontext_t*>(load) : &scheduler_context;
    swapcontext(from, to);
}
static void* new_fiber(int index, void (*entry)()) {
    getcontext(&contexts[index]);
    contexts[index].uc_stack.ss_sp = stacks + static_cast<size_t>(index) * kStack;
    contexts[index].uc_stack.ss_size = kStack;
    makecontext(&contexts[index], entry, 0);
    return &contexts[index];
}
#endif

static inline void fail(const char* text) {
    if (!failed) {
        snprintf(message, sizeof message, "block (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z, text);
        failed = true;
    }
}

// Leaves the running fiber; comes back when the scheduler takes it again.
static inline void yield() { switch_to(&fibers[current].sp, scheduler); }

// A turn of a waiting loop.
static inline void pause() {
    fibers[current].paused = true;
    yield();
}

static void entry() {
    body(body_context);
    fibers[current].state = kDone;
    yield();
}

static void poison(void* data, size_t bytes) { memset(data, 0xFF, bytes); }

// A static __shared__ variable announces itself when it is first reached.
struct Shared {
    Shared(void* data, size_t bytes) {
        if (num_regions < kRegions)
            regions[num_regions++] = {data, bytes};
        else
            fail("more shared variables than the emulator keeps");
        poison(data, bytes);
    }
};

// Words that the launch before writes so late that a block sees the old ones until it waits for that launch.
constexpr int kLate = 4;
static int *late_at[kLate], late_before[kLate], late_after[kLate], num_late;

static inline void previous_ends() {
    for (int i = 0; i < num_late; ++i) *late_at[i] = late_after[i];
}

static void run_block() {
    for (int i = 0; i < num_late; ++i) *late_at[i] = late_before[i];
    for (int i = 0; i < num_regions; ++i) poison(regions[i].data, regions[i].bytes);
    arrived = barrier_count = 0;
    for (int i = 0; i < threads; ++i) {
        fibers[i] = {};
        fibers[i].sp = new_fiber(i, entry);
    }
    while (!failed) {
        int done = 0, ran = 0, paused = 0, in_warp = 0;
        for (int turn = 0; turn < threads && !failed; ++turn) {
            const int i = backward ? threads - 1 - turn : turn;
            Fiber& fiber = fibers[i];
            if (fiber.state == kReady) {
                current = i;
                threadIdx = {static_cast<unsigned>(i), 0, 0};
                fiber.paused = false;
                switch_to(&scheduler, fiber.sp);
                ++ran;
                paused += fiber.paused;
            }
            done += fiber.state == kDone;
            in_warp += fiber.state == kInWarp;
        }
        if (done == threads) return;
        if (arrived == threads) {
            barrier_total = barrier_count;
            arrived = barrier_count = 0;
            for (int i = 0; i < threads; ++i) fibers[i].state = kReady;
        } else if (ran == 0) {
            char text[256];
            snprintf(text, sizeof text,
                     "a barrier is not reached by all: of %d threads %d wait at __syncthreads, %d in a warp operation, "
                     "%d have ended", threads, arrived, in_warp, done);
            fail(text);
        } else if (ran == paused) {
            sched_yield();
        }
    }
}

static inline int barrier(int value) {
    barrier_count += value;
    ++arrived;
    fibers[current].state = kAtBarrier;
    yield();
    return barrier_total;
}

static inline bool complete_warp(int first, unsigned mask, Operation operation) {
    uint64_t ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        if (first + lane >= threads) {
            fail("a warp operation names a lane that does not exist");
            return false;
        }
        const Fiber& other = fibers[first + lane];
        if (other.state != kInWarp || other.mask != mask || other.operation != operation) return false;
        ballot |= static_cast<uint64_t>(other.value != 0) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Fiber& other = fibers[first + lane];
        const bool known = other.source >= 0 && other.source < 32 && (mask >> other.source & 1);
        other.result = operation == kBallot ? ballot : known ? fibers[first + other.source].value : ~0ull;
    }
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) fibers[first + lane].state = kReady;
    return true;
}

static inline uint64_t in_warp(Operation operation, unsigned mask, uint64_t value, int source) {
    Fiber& me = fibers[current];
    if (!(mask >> (current & 31) & 1)) fail("a warp operation without the lane that calls it");
    me.operation = operation;
    me.mask = mask;
    me.value = value;
    me.source = source;
    me.state = kInWarp;
    if (!complete_warp(current & ~31, mask, operation)) yield();
    return me.result;
}

template <class T>
static inline T shuffle(unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = in_warp(kShuffle, mask, bits, source);
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The source lane of a shuffle within `width` lanes; a lane outside reads itself.
static inline int inside(int wanted, int lane, int width) {
    const int first = lane & ~(width - 1);
    return wanted >= first && wanted < first + width ? wanted : lane;
}

// Arguments arrive as addresses with a letter each: p address, i int32, f FP32, s structure (its size is given).
template <class T>
constexpr char letter() {
    if (std::is_pointer<T>::value || (std::is_integral<T>::value && sizeof(T) == 8)) return 'p';
    if (std::is_integral<T>::value && sizeof(T) == 4) return 'i';
    return std::is_same<T, float>::value ? 'f' : 's';
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<typename std::remove_cv<A>::type*>(arguments[I])...);
}

template <class... A>
static int launch(void (*kernel)(A...), const char* letters, const int* sizes, void** arguments, const int* grid,
                  int block, int shared, int order) {
    failed = false;
    const char expected[] = {letter<typename std::remove_cv<A>::type>()..., 0};
    const int expected_sizes[] = {static_cast<int>(sizeof(A))..., 0};
    bool agree = strlen(letters) == sizeof...(A);
    for (size_t i = 0; agree && i < sizeof...(A); ++i)
        agree = letters[i] == expected[i] && sizes[i] == expected_sizes[i];
    if (!agree) {
        snprintf(message, sizeof message, "arguments are '%s', the kernel takes '%s' (or a structure of another size)",
                 letters, expected);
        return 1;
    }
    if (block < 1 || block > kThreads || shared < 0 || shared > kShared) {
        snprintf(message, sizeof message, "a block of %d threads with %d bytes of shared memory", block, shared);
        return 1;
    }
    if (stacks == nullptr)
        stacks = static_cast<char*>(mmap(nullptr, static_cast<size_t>(kThreads) * kStack, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    struct Call {
        void (*kernel)(A...);
        void** arguments;
    } one{kernel, arguments};
    body_context = &one;
    body = [](void* context) {
        auto* one = static_cast<Call*>(context);
        call(one->kernel, one->arguments, std::index_sequence_for<A...>());
    };
    threads = block;
    backward = order != 0;
    blockDim = {static_cast<unsigned>(block), 1, 1};
    gridDim = {static_cast<unsigned>(grid[0]), static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2])};
    const long long blocks = static_cast<long long>(grid[0]) * grid[1] * grid[2];
    for (long long turn = 0; turn < blocks && !failed; ++turn) {
        const long long i = backward ? blocks - 1 - turn : turn;
        blockIdx = {static_cast<unsigned>(i % grid[0]), static_cast<unsigned>(i / grid[0] % grid[1]),
                    static_cast<unsigned>(i / grid[0] / grid[1])};
        poison(dynamic, shared);
        memset(dynamic + shared, 0xA5, kGuard);
        run_block();
        for (int byte = 0; byte < kGuard && !failed; ++byte)
            if (dynamic[shared + byte] != 0xA5) fail("a write past the dynamic shared memory");
    }
    return failed ? 1 : 0;
}

}  // namespace emulated

extern "C" const char* strata_emulated_message() { return emulated::message; }

// For the launches from now on: words whose value now is seen late, and what is there before.
extern "C" void strata_emulated_late(int count, int** at, const int* before) {
    emulated::num_late = count < emulated::kLate ? count : emulated::kLate;
    for (int i = 0; i < emulated::num_late; ++i) {
        emulated::late_at[i] = at[i];
        emulated::late_before[i] = before[i];
        emulated::late_after[i] = *at[i];
    }
}

static inline void __syncthreads() { emulated::barrier(0); }
static inline int __syncthreads_count(int predicate) { return emulated::barrier(predicate != 0); }
static inline int __syncthreads_or(int predicate) { return emulated::barrier(predicate != 0) != 0; }
static inline int __syncthreads_and(int predicate) { return emulated::barrier(predicate != 0) == emulated::threads; }
static inline void __syncwarp(unsigned mask = ~0u) { emulated::in_warp(emulated::kSync, mask, 0, 0); }
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return static_cast<unsigned>(emulated::in_warp(emulated::kBallot, mask, predicate != 0, 0));
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const int me = emulated::current & 31;
    return emulated::shuffle(mask, value, (me & ~(width - 1)) + (lane & (width - 1)));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const int me = emulated::current & 31;
    return emulated::shuffle(mask, value, emulated::inside(me ^ lanes, me, width));
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const int me = emulated::current & 31;
    return emulated::shuffle(mask, value, emulated::inside(me + static_cast<int>(lanes), me, width));
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const int me = emulated::current & 31;
    return emulated::shuffle(mask, value, emulated::inside(me - static_cast<int>(lanes), me, width));
}

// Atomic towards host threads too, which may share the memory.
template <class T>
static inline T emulated_exchange_if(T* at, T (*next)(T, T), T value) {
    T before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &before, next(before, value), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return before;
}
template <class T>
static inline typename std::enable_if<std::is_integral<T>::value, T>::type atomicAdd(T* at, T value) {
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
static inline float atomicAdd(float* at, float value) {  // fibers only: sums of floats do not meet the host
    const float before = *at;
    *at = before + value;
    return before;
}
template <class T>
static inline T atomicMax(T* at, T value) {
    return emulated_exchange_if<T>(at, [](T a, T b) { return a < b ? b : a; }, value);
}
template <class T>
static inline T atomicMin(T* at, T value) {
    return emulated_exchange_if<T>(at, [](T a, T b) { return b < a ? b : a; }, value);
}
template <class T>
static inline T atomicOr(T* at, T value) { return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST); }
template <class T>
static inline T atomicAnd(T* at, T value) { return __atomic_fetch_and(at, value, __ATOMIC_SEQ_CST); }
template <class T>
static inline T atomicExch(T* at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
template <class T>
static inline T atomicCAS(T* at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __nanosleep(unsigned) { emulated::pause(); }
template <class T>
static inline T __ldg(const T* at) { return *at; }
template <class T>
static inline T __ldcg(const T* at) { return *at; }
template <class T>
static inline T __ldcs(const T* at) { return *at; }

static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
static inline float __int2float_rn(int a) { return static_cast<float>(a); }
template <class To, class From>
static inline To emulated_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float a) { return emulated_bits<unsigned>(a); }
static inline int __float_as_int(float a) { return emulated_bits<int>(a); }
static inline float __uint_as_float(unsigned a) { return emulated_bits<float>(a); }
static inline float __int_as_float(int a) { return emulated_bits<float>(a); }
static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
static inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
static inline int __ffs(int a) { return __builtin_ffs(a); }
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
    return c;
}
static inline int __float2int_rn(float a) {  // saturates; NaN is 0
    if (!(a == a)) return 0;
    const float whole = nearbyintf(a);
    return whole >= 0x1p31f ? 0x7FFFFFFF : whole < -0x1p31f ? static_cast<int>(0x80000000u) : static_cast<int>(whole);
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a < b ? b : a; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a < b ? b : a; }

// prmt: a nibble of the selector picks one of eight bytes, its top bit replicates that byte's sign instead.
static inline unsigned strata_emulated_prmt(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> 4 * i & 15;
        unsigned byte = static_cast<unsigned>(bytes >> 8 * (pick & 7)) & 0xFF;
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << 8 * i;
    }
    return result;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    return strata_emulated_prmt(a, b, selector & 0x7777u);
}
