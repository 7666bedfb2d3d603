// The one thread pool of the native kernels: a caller and its pinned workers run one job at a time.
//
// Workers spin for a moment after the last job, then sleep on a futex; a waiting worker joins a new job within
// microseconds and one that wakes too late is not waited for. Bodies claim their own share of the work, so the
// split never decides a result. Callers on several threads take turns. Each thread runs a body with
// round-to-nearest and denormals on (FloatingPointMode) and gets its own mode back afterwards.
// The pool must not know what a body computes.
#pragma once

#include <type_traits>

#include "status.h"

namespace strata {

// One thread's part of a job: 0 <= worker < workers, where 0 is the caller. Returns a Status; the first that is not
// kOk ends the job (see job_failed) and is what run_on_all returns, with its words. A fault of memory counts as one, so a
// body may be left anywhere (task_guard.h): it holds no lock and owns no memory. Must not throw.
using PoolBody = int (*)(void* context, int worker, int workers);

// Runs `body` on the caller and every worker that is awake in time. Returns when all that joined have returned.
// A call from inside a body runs on that thread alone.
int run_on_all(PoolBody body, void* context);

// Whether some body of the job that the calling thread is inside has failed: what it was to do is not done any more. Bodies
// that wait for others look at it.
bool job_failed();

// For bodies that wait for others: the time now, and that the thread has waited since then, which is not work.
long pool_clock();
void count_waiting(long since);

// A slice of a loop, begin <= i < end. Returns a Status.
using LoopBody = int (*)(void* context, long begin, long end);

// Runs slices of at most `grain` over [0, count) on the pool, taken in rising order.
int parallel_for(long count, long grain, LoopBody body, void* context);

// The same for a lambda `int(long begin, long end)` (or void).
template <class Function>
int parallel(long count, long grain, Function&& function) {
    using Plain = std::remove_reference_t<Function>;
    return parallel_for(
        count, grain,
        [](void* context, long begin, long end) -> int {
            Plain& call = *static_cast<Plain*>(context);
            if constexpr (std::is_void_v<decltype(call(begin, end))>) {
                call(begin, end);
                return 0;
            } else {
                return call(begin, end);
            }
        },
        const_cast<void*>(static_cast<const void*>(&function)));
}

// While it exists workers look for the next job longer before they sleep: for a caller whose jobs come in a series with
// gaps of their own, in which each wake-up would be waited for.
class SeriesOfJobs {
  public:
    SeriesOfJobs();
    ~SeriesOfJobs();
    SeriesOfJobs(const SeriesOfJobs&) = delete;
    SeriesOfJobs& operator=(const SeriesOfJobs&) = delete;
};

// Threads of a job, the caller included.
int pool_threads();

// Sets round-to-nearest, no flush to zero, no denormals-are-zero, exceptions masked; restores at the end of scope.
class FloatingPointMode {
  public:
    FloatingPointMode();
    ~FloatingPointMode();
    FloatingPointMode(const FloatingPointMode&) = delete;
    FloatingPointMode& operator=(const FloatingPointMode&) = delete;

  private:
    unsigned saved_;
};

}  // namespace strata

// (Re)starts the pool with `threads` threads, the caller included. `cpus`: `count` logical processors; worker i
// (1 <= i < threads) is pinned to cpus[i % count], the caller is left where it is; count 0 pins nobody. Not while a
// job runs on another thread: waits for it. Never called: one thread.
STRATA_API int strata_pool_configure(int threads, const int* cpus, int count);
STRATA_API int strata_pool_threads();
// Jobs since the start, wake-ups from sleep, workers that joined jobs (for statistics).
STRATA_API void strata_pool_counters(long long* jobs, long long* wakes, long long* joins);
// Measures from now on (or no longer) how long each thread works, from nothing: inside bodies, without waiting. Costs two
// looks at the clock a thread and job.
STRATA_API void strata_pool_measure(int on);
// Nanoseconds of the first `count` threads, the caller's first, since measuring began.
STRATA_API void strata_pool_busy(long long* ns, int count);
// Nanoseconds that a worker looks for the next job now before it sleeps.
STRATA_API long strata_pool_patience();
// Median and largest microseconds of `rounds` empty jobs, each after `pause_us` of rest, until all workers joined.
STRATA_API int strata_pool_latency(int rounds, int pause_us, double* median_us, double* largest_us);
