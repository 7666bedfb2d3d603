#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "task_guard.h"

namespace strata {
namespace {

// A worker that has just finished a job looks for the next one for this long before it sleeps: longer than the gap
// between two kernels of a decode round (5-100 us from Python, with small operations that wake nobody between two large
// ones), short enough that an idle engine uses no processor.
constexpr long kSpinNs = 200'000;
// In a series of jobs, a GPU's rounds: layers without a job, and what lies between two rounds, take up to about 0.5 ms, and
// waking fifteen threads of a virtual machine costs the caller tens of microseconds.
constexpr long kSeriesSpinNs = 1'000'000;
constexpr int kMostThreads = 256;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

long now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// Of the job that the thread is inside: null outside of jobs.
thread_local const std::atomic<int>* status_of_job = nullptr;
thread_local long waited_ns = 0;
std::atomic<bool> is_measuring{false};
std::atomic<int> num_series{0};

long spin_ns() { return num_series.load(std::memory_order_relaxed) > 0 ? kSeriesSpinNs : kSpinNs; }

// One generation of workers. The ticket holds the number of the job, whether it still takes workers, and how many are
// inside, so that joining is one addition and a late worker can never touch a job that has ended.
class Pool {
  public:
    int start(int threads, const int* cpus, int count) {
        threads_ = 1;
        for (int i = 1; i < threads; ++i) {
            auto* seat = new (std::nothrow) Seat{this, i};
            pthread_t thread;
            if (seat == nullptr || pthread_create(&thread, nullptr, &Pool::enter, seat) != 0) {
                delete seat;
                stop();
                return fail(kNoMemory, "thread %d of %d could not be started", i, threads);
            }
            if (count > 0) pin(thread, cpus[i % count]);
            workers_[started_++] = thread;
        }
        threads_ = threads;
        return kOk;
    }

    void stop() {
        stopping_.store(true);
        announce();
        for (int i = 0; i < started_; ++i) pthread_join(workers_[i], nullptr);
        started_ = 0;
    }

    int run(PoolBody body, void* context) {
        body_ = body;
        context_ = context;
        status_.store(kOk, std::memory_order_relaxed);
        jobs_.fetch_add(1, std::memory_order_relaxed);
        ticket_.fetch_add(kNextJob | kOpen, std::memory_order_seq_cst);  // keeps who is on the way out of the last one
        if (threads_ > 1) announce();
        work(0);
        // Close: nobody joins from here on. Wait for those inside; they are at the end of their last slice.
        ticket_.fetch_and(~kOpen, std::memory_order_acq_rel);
        for (long spins = 0; (ticket_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
            relax();
            if (spins > 2000) sched_yield();  // more threads than processors: let the last worker run
        }
        const int status = status_.load(std::memory_order_acquire);
        return status == kOk ? kOk : fail(status, "%s", words_);
    }

    int threads() const { return threads_; }

    void forget_busy() {
        for (Busy& busy : busy_) busy.ns.store(0, std::memory_order_relaxed);
    }
    long long busy_ns(int index) const { return busy_[index].ns.load(std::memory_order_relaxed); }

    long long joins() const {
        long long all = 0;
        for (const Busy& busy : busy_) all += busy.joins.load(std::memory_order_relaxed);
        return all;
    }

    std::atomic<long long> jobs_{0}, wakes_{0};

  private:
    struct Seat {
        Pool* pool;
        int index;
    };

    struct alignas(64) Busy {
        std::atomic<long long> ns{0}, joins{0};
    };

    static constexpr uint64_t kNextJob = 1ull << 32;
    static constexpr uint64_t kOpen = 1ull << 31;
    static constexpr uint64_t kInside = kOpen - 1;

    static void pin(pthread_t thread, int cpu) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        pthread_setaffinity_np(thread, sizeof set, &set);  // refused (a processor taken away): it runs unpinned
    }

    static void* enter(void* argument) {
        Seat seat = *static_cast<Seat*>(argument);
        delete static_cast<Seat*>(argument);
        pthread_setname_np(pthread_self(), "strata-worker");
        seat.pool->live(seat.index);
        return nullptr;
    }

    // Bumps the word that sleepers wait on; the system call is made only if somebody sleeps.
    void announce() {
        bell_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(bell_);
    }

    void live(int index) {
        uint64_t last = ticket_.load() >> 32;
        if (ticket_.load() & kOpen) last -= 1;
        while (true) {
            const long since = now_ns();
            for (int spins = 1; !stopping_.load(std::memory_order_relaxed); ++spins) {
                if (join(last, index)) break;
                relax();
                if (spins % 64 == 0 && now_ns() - since > spin_ns()) {
                    rest(last);
                    break;
                }
            }
            if (stopping_.load(std::memory_order_acquire)) return;
        }
    }

    void rest(uint64_t last) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t bell = bell_.load(std::memory_order_seq_cst);
        const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
        const bool work_waits = (ticket >> 32) != last && (ticket & kOpen) != 0;
        if (!work_waits && !stopping_.load(std::memory_order_seq_cst)) {
            futex_wait(bell_, bell);
            wakes_.fetch_add(1, std::memory_order_relaxed);
        }
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

    bool join(uint64_t& last, int index) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        if ((ticket >> 32) == last || (ticket & kOpen) == 0) return false;
        // Added, not compared: many come at once, and a comparison fails for all but one of them each time.
        ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
        if ((ticket >> 32) == last || (ticket & kOpen) == 0) {
            ticket_.fetch_sub(1, std::memory_order_acq_rel);  // it was closed in between
            return false;
        }
        last = ticket >> 32;
        busy_[index].joins.fetch_add(1, std::memory_order_relaxed);
        work(index);
        ticket_.fetch_sub(1, std::memory_order_acq_rel);
        return true;
    }

    void work(int index) {
        FloatingPointMode mode;
        status_of_job = &status_;
        waited_ns = 0;
        const long began = is_measuring.load(std::memory_order_relaxed) ? now_ns() : 0;
        const int status = guarded([&] { return body_(context_, index, threads_); });
        if (began != 0) busy_[index].ns.fetch_add(now_ns() - began - waited_ns, std::memory_order_relaxed);
        status_of_job = nullptr;
        if (status == kOk) return;
        int none = kOk;
        std::lock_guard<std::mutex> hold(words_lock_);
        if (status_.compare_exchange_strong(none, status)) {
            std::strncpy(words_, strata_last_error(), sizeof words_ - 1);
            words_[sizeof words_ - 1] = '\0';
        }
    }

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> bell_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) PoolBody body_ = nullptr;
    void* context_ = nullptr;
    std::atomic<int> status_{kOk};
    std::mutex words_lock_;
    char words_[512] = "";
    int threads_ = 1;
    pthread_t workers_[kMostThreads];
    Busy busy_[kMostThreads];
    int started_ = 0;
};

std::mutex turn;             // one job at a time; held for the whole of it
Pool* pool = nullptr;        // guarded by `turn`; never freed at exit, so that no destructor races a worker
pid_t owner = 0;
std::atomic<int> threads_in_force{1};

// After a fork the workers are gone and the old pool's words may hold anything: leave it and start with one thread.
Pool* current_pool() {
    if (pool == nullptr || owner != getpid()) {
        pool = new (std::nothrow) Pool;
        owner = getpid();
        threads_in_force.store(1);
    }
    return pool;
}

struct Loop {
    LoopBody body;
    void* context;
    long count, grain;
    std::atomic<long> next{0};
};

int run_slices(void* context, int, int) {
    Loop& loop = *static_cast<Loop*>(context);
    while (!job_failed()) {
        const long begin = loop.next.fetch_add(loop.grain, std::memory_order_relaxed);
        if (begin >= loop.count) break;
        const int status = loop.body(loop.context, begin, std::min(begin + loop.grain, loop.count));
        if (status != kOk) return status;
    }
    return kOk;
}

}  // namespace

FloatingPointMode::FloatingPointMode() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1F80);
#else
    saved_ = 0;
#endif
}

FloatingPointMode::~FloatingPointMode() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#endif
}

int run_on_all(PoolBody body, void* context) {
    if (status_of_job != nullptr) return body(context, 0, 1);
    std::lock_guard<std::mutex> hold(turn);
    Pool* mine = current_pool();
    if (mine == nullptr) return fail(kNoMemory, "the thread pool could not be made");
    return mine->run(body, context);
}

SeriesOfJobs::SeriesOfJobs() { num_series.fetch_add(1); }
SeriesOfJobs::~SeriesOfJobs() { num_series.fetch_sub(1); }

bool job_failed() { return status_of_job != nullptr && status_of_job->load(std::memory_order_relaxed) != kOk; }

long pool_clock() { return now_ns(); }

void count_waiting(long since) { waited_ns += now_ns() - since; }

int parallel_for(long count, long grain, LoopBody body, void* context) {
    if (count <= 0) return kOk;
    grain = std::max(grain, 1L);
    if (count <= grain) {
        FloatingPointMode mode;
        return guarded([&] { return body(context, 0, count); });
    }
    Loop loop{body, context, count, grain};
    return run_on_all(&run_slices, &loop);
}

int pool_threads() { return threads_in_force.load(std::memory_order_relaxed); }

namespace {

int count_arrival(void* context, int, int workers) {
    auto& arrived = *static_cast<std::atomic<int>*>(context);
    arrived.fetch_add(1);
    const long since = now_ns();
    while (arrived.load() < workers && now_ns() - since < 100'000'000L) relax();
    return kOk;
}

}  // namespace
}  // namespace strata

int strata_pool_configure(int threads, const int* cpus, int count) {
    using namespace strata;
    if (threads < 1 || threads > kMostThreads)
        return fail(kBadArgument, "%d threads asked, 1 to %d are possible", threads, kMostThreads);
    if (count > 0 && cpus == nullptr) return fail(kBadArgument, "no list of processors given");
    for (int i = 0; i < count; ++i)
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return fail(kBadArgument, "no processor %d", cpus[i]);
    std::lock_guard<std::mutex> hold(turn);
    if (pool != nullptr && owner == getpid()) {
        pool->stop();
        delete pool;
    }
    pool = new (std::nothrow) Pool;
    owner = getpid();
    threads_in_force.store(1);
    if (pool == nullptr) return fail(kNoMemory, "the thread pool could not be made");
    const int status = pool->start(threads, cpus, count);
    if (status == kOk) threads_in_force.store(threads);
    return status;
}

long strata_pool_patience() { return strata::spin_ns(); }

int strata_pool_threads() { return strata::pool_threads(); }

void strata_pool_counters(long long* jobs, long long* wakes, long long* joins) {
    std::lock_guard<std::mutex> hold(strata::turn);
    strata::Pool* mine = strata::current_pool();
    if (mine == nullptr) return;
    *jobs = mine->jobs_.load();
    *wakes = mine->wakes_.load();
    *joins = mine->joins();
}

void strata_pool_measure(int on) {
    std::lock_guard<std::mutex> hold(strata::turn);
    if (strata::Pool* mine = strata::current_pool()) mine->forget_busy();
    strata::is_measuring.store(on != 0);
}

void strata_pool_busy(long long* ns, int count) {
    std::lock_guard<std::mutex> hold(strata::turn);
    strata::Pool* mine = strata::current_pool();
    for (int i = 0; i < count; ++i) ns[i] = mine != nullptr && i < strata::kMostThreads ? mine->busy_ns(i) : 0;
}

int strata_pool_latency(int rounds, int pause_us, double* median_us, double* largest_us) {
    using namespace strata;
    if (rounds < 1 || rounds > 100'000) return fail(kBadArgument, "%d rounds asked", rounds);
    std::unique_ptr<double[]> took(new (std::nothrow) double[rounds]);
    if (!took) return fail(kNoMemory, "no memory for %d rounds", rounds);
    for (int i = 0; i < rounds; ++i) {
        timespec rest{0, pause_us * 1000L};
        if (pause_us > 0) nanosleep(&rest, nullptr);
        std::atomic<int> arrived{0};
        const long since = now_ns();
        const int status = run_on_all(&count_arrival, &arrived);
        if (status != kOk) return status;
        took[i] = static_cast<double>(now_ns() - since) / 1000.0;
    }
    std::sort(took.get(), took.get() + rounds);
    *median_us = took[rounds / 2];
    *largest_us = took[rounds - 1];
    return kOk;
}
