#include "conductor.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "checksum.h"
#include "expert.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace strata {
namespace {

long now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// How long the thread looks for the next round before it sleeps: waking it costs a round tens of microseconds, and a
// greedy round's work between two rounds takes less than this.
constexpr long kAwakeNs = 1'000'000;
constexpr int kLooks = 64;  // between two looks at the clock

enum FaultKind : int { kNoFault = 0, kSleep = 1, kDie = 2, kAbort = 3 };

class Conductor {
  public:
    explicit Conductor(const StrataConductorConfig& config)
        : c_(config),
          tasks_(static_cast<size_t>(config.most_picks)),
          waiting_(static_cast<size_t>(config.most_picks)),
          handled_(posted()) {}

    ~Conductor() { stop(); }

    int start() {
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error&) {
            return fail(kNoMemory, "the conductor's thread could not be started");
        }
        return kOk;
    }

    // Neither `begin` nor `end` waits for the thread to be scheduled where nothing of it is outstanding: the thread
    // answers whatever is posted, and what is posted belongs to a round.
    int begin(int wait_ms) {
        if (!rests()) wake();
        if (!rests() && !wait(wait_ms))
            return fail(kTaskFault, "the CPU's worker has not come back from an earlier round for %d ms", wait_ms);
        if (dead_.load()) {
            thread_.join();
            dead_.store(false);
            handled_.store(posted());
            ++counters_.restarts;
            const int status = start();
            if (status != kOk) return status;
        }
        status_ = kOk;
        words_[0] = '\0';
        exchange_ = 0;
        mute_ = false;
        settled_ = posted();
        began_ns_ = now_ns();
        __atomic_store_n(&c_.mailbox->abort, 0u, __ATOMIC_RELEASE);
        // The thread says that it sleeps before it looks for the last time: one of the two is seen.
        active_.store(true);
        if (asleep_.load()) wake();
        return kOk;
    }

    int end() {
        active_.store(false);
        // All of an ordinary round is answered; for a round that was given up `begin` waits.
        if (!rests() && !wait(2)) return kOk;
        if (dead_.load()) return fail(kTaskFault, "the CPU's worker died in the middle of a round");
        return status_ == kOk ? kOk : fail(status_, "%s", words_);
    }

    // A host that waits between two launches has nothing else to do: it looks, so that an answer is seen at once.
    int settle(int wait_ms) {
        const unsigned number = posted();
        const long until = now_ns() + wait_ms * 1'000'000L;
        do {
            for (int look = 0; look < kLooks && !rests(); ++look) relax();
        } while (!rests() && now_ns() < until);
        if (!rests()) return fail(kTaskFault, "the CPU's worker did not answer within %d ms", wait_ms);
        if (number != settled_) ++counters_.settled;
        settled_ = number;
        return kOk;
    }

    void abort() { __atomic_store_n(&c_.mailbox->abort, 1u, __ATOMIC_RELEASE); }

    void plan_fault(int kind, int number, int ms) {
        fault_number_.store(number);
        fault_ms_.store(ms);
        fault_kind_.store(kind);
    }

    StrataConductorCounters counters() {
        std::lock_guard<std::mutex> lock(mutex_);
        return counters_;
    }

  private:
    unsigned posted() const { return __atomic_load_n(&c_.mailbox->posted, __ATOMIC_ACQUIRE); }

    bool rests() const { return handled_.load() == posted() || dead_.load(); }

    void wake() {
        { std::lock_guard<std::mutex> lock(mutex_); }  // it sleeps already, or looks after this
        wake_.notify_one();
    }

    bool wait(int ms) {
        std::unique_lock<std::mutex> lock(mutex_);
        return idle_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return rests(); });
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_.store(true);
            wake_.notify_one();
        }
        if (thread_.joinable()) thread_.join();
    }

    // Answers posts until it is stopped, or a planned fault ends it.
    void run() {
        // A post of a round that was given up while this thread had no processor is answered too, or no round could begin.
        const auto called = [this] { return active_.load() || stopping_.load() || handled_.load() != posted(); };
        long since = now_ns();
        while (!stopping_.load()) {
            if (look_for_post()) {
                const long began = now_ns();
                counters_.wait_ns += began - std::max(since, began_ns_);
                const unsigned number = posted();
                const bool lives = pass_fault(++exchange_);
                if (lives && status_ == kOk && !mute_) answer(number);
                since = now_ns();
                counters_.work_ns += since - began;
                lives ? handled_.store(number) : dead_.store(true);
                if (!lives || !active_.load()) {
                    std::lock_guard<std::mutex> lock(mutex_);  // whoever waits sleeps already, or looks after this
                    idle_.notify_all();
                }
                if (!lives) return;
            } else if (!called()) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.store(true);
                wake_.wait(lock, called);
                asleep_.store(false);
            }
        }
    }

    // False after a while without a post.
    bool look_for_post() const {
        const unsigned last = handled_.load();
        const long until = now_ns() + kAwakeNs;
        do {
            for (int look = 0; look < kLooks; ++look) {
                if (posted() != last) return true;
                relax();
            }
        } while (!stopping_.load(std::memory_order_relaxed) && now_ns() < until);
        return false;
    }

    bool pass_fault(int exchange) {
        const int kind = fault_kind_.load();
        if (kind == kNoFault || fault_number_.load() != exchange) return true;
        fault_kind_.store(kNoFault);
        if (kind == kSleep) std::this_thread::sleep_for(std::chrono::milliseconds(fault_ms_.load()));
        if (kind == kAbort) {
            abort();
            mute_ = true;
        }
        return kind != kDie;
    }

    void answer(unsigned number) {
        const bool probed = c_.mailbox->layer == kProbeLayer;
        const int status = probed ? copy_probe() : compute();
        if (status != kOk) {
            status_ = status;
            std::strncpy(words_, strata_last_error(), sizeof words_ - 1);
            abort();
            return;
        }
        // A round that was given up in the meantime does not look any more, and numbers are never used twice.
        __atomic_store_n(&c_.mailbox->done, number, __ATOMIC_RELEASE);
        if (!probed) ++counters_.exchanges;
    }

    int copy_probe() {
        std::memcpy(c_.out, c_.x, static_cast<size_t>(c_.hidden) * sizeof(float));
        return kOk;
    }

    int compute() {
        const StrataMailbox& m = *c_.mailbox;
        if (m.layer < 0 || m.layer >= c_.num_layers || m.num_tasks < 0 || m.num_picks < m.num_tasks ||
            m.num_picks > c_.most_picks || m.num_rows < 1 || m.num_rows > c_.most_rows)
            return fail(kBadArgument, "the mailbox holds layer %d, %d tasks of %d picks, %d rows", m.layer, m.num_tasks,
                        m.num_picks, m.num_rows);
        std::memset(c_.flags, 0, static_cast<size_t>(m.num_rows));
        long ready = 0, missing = 0;
        for (int i = 0; i < m.num_tasks; ++i) {
            const StrataMailTask& task = c_.tasks[i];
            if (task.expert < 0 || task.expert >= c_.num_experts)
                return fail(kBadArgument, "the mailbox asks for expert %d of %lld", task.expert,
                            static_cast<long long>(c_.num_experts));
            const int64_t flat = m.layer * c_.num_experts + task.expert;
            ++counters_.by_kind[c_.kind[flat] & 7];
            if (c_.address[flat] == 0) {
                waiting_[static_cast<size_t>(missing++)] = i;
                continue;
            }
            if (const int status = check(flat, reinterpret_cast<const void*>(c_.address[flat]))) return status;
            tasks_[static_cast<size_t>(ready++)] = native(task, flat, c_.address[flat]);
        }
        if (const int status = compute(ready)) return status;
        for (long done = 0; done < missing;) {
            const long count = std::min<long>(missing - done, c_.num_buffers);
            if (const int status = read(waiting_.data() + done, count)) return status;
            if (const int status = compute(count)) return status;
            done += count;
        }
        return kOk;
    }

    StrataExpertTask native(const StrataMailTask& task, int64_t flat, uint64_t address) const {
        const float* s = c_.scales + 3 * flat;
        return {address, {s[0], s[1], s[2]}, task.first, task.count, 0};
    }

    int compute(long count) {
        const StrataMailbox& m = *c_.mailbox;
        return strata_expert_compute(c_.hidden, c_.intermediate, static_cast<int>(c_.format),
                                     tasks_.data(), count, c_.rows, c_.slots, m.num_picks, c_.x, m.num_rows, c_.out,
                                     c_.most_picks, c_.flags);
    }

    // Compares an expert's bytes with their checksum where that has not been done.
    int check(int64_t flat, const void* bytes) {
        if (c_.checked == nullptr || c_.checked[flat] != 0) return kOk;
        uint64_t sum = 0;
        if (const int status = strata_checksum_of(bytes, static_cast<size_t>(c_.blob_bytes), &sum)) return status;
        if (sum != c_.checksum[flat])
            return fail(kTaskFault, "expert %lld of layer %lld: the bytes do not have their checksum",
                        static_cast<long long>(flat % c_.num_experts), static_cast<long long>(flat / c_.num_experts));
        c_.checked[flat] = 1;
        return kOk;
    }

    // Reads the experts of some tasks into the buffers, all at once, and makes them the next tasks.
    int read(const int* which, long count) {
        const int layer = c_.mailbox->layer;
        if (c_.file == nullptr || c_.num_buffers < 1)
            return fail(kTaskFault, "expert %d of layer %d is in no memory and no file was given",
                        c_.tasks[which[0]].expert, layer);
        const int status = parallel(count, 1, [&](long begin, long end) -> int {
            for (long i = begin; i < end; ++i) {
                const int64_t flat = layer * c_.num_experts + c_.tasks[which[i]].expert;
                if (const int failed = read_one(flat, c_.buffers + i * c_.stride)) return failed;
            }
            return kOk;
        });
        if (status != kOk) return status;
        counters_.file_reads += count;
        for (long i = 0; i < count; ++i) {
            const StrataMailTask& task = c_.tasks[which[i]];
            const int64_t flat = layer * c_.num_experts + task.expert;
            tasks_[static_cast<size_t>(i)] = native(task, flat, reinterpret_cast<uint64_t>(c_.buffers + i * c_.stride));
        }
        return kOk;
    }

    int read_one(int64_t flat, uint8_t* target) const {
        for (int64_t done = 0; done < c_.blob_bytes;) {
            const ssize_t got = pread(c_.file[flat], target + done, static_cast<size_t>(c_.blob_bytes - done),
                                      c_.offset[flat] + done);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0)
                return fail(kTaskFault, "expert %lld of layer %lld cannot be read: %s",
                            static_cast<long long>(flat % c_.num_experts), static_cast<long long>(flat / c_.num_experts),
                            got < 0 ? std::strerror(errno) : "the file ends before it");
            done += got;
        }
        if (c_.checksum != nullptr && strata_checksum(target, static_cast<size_t>(c_.blob_bytes)) != c_.checksum[flat])
            return fail(kTaskFault, "expert %lld of layer %lld: the bytes read do not have their checksum",
                        static_cast<long long>(flat % c_.num_experts), static_cast<long long>(flat / c_.num_experts));
        return kOk;
    }

    const StrataConductorConfig c_;
    const SeriesOfJobs series_;
    std::vector<StrataExpertTask> tasks_;
    std::vector<int> waiting_;
    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::atomic<unsigned> handled_;  // the number posted last that the thread is done with
    std::atomic<bool> active_{false}, stopping_{false}, asleep_{false}, dead_{false};
    // The thread's while something is posted that is not handled, else the caller's.
    bool mute_ = false;
    unsigned settled_ = 0;  // the number that `settle` has counted last
    long began_ns_ = 0;
    int exchange_ = 0;
    int status_ = kOk;
    char words_[512] = "";
    StrataConductorCounters counters_{};
    std::atomic<int> fault_kind_{kNoFault}, fault_number_{0}, fault_ms_{0};
};

}  // namespace
}  // namespace strata

using strata::Conductor;

STRATA_API int strata_conductor_open(const StrataConductorConfig* config, void** conductor) {
    using namespace strata;
    if (config == nullptr || conductor == nullptr || config->mailbox == nullptr || config->x == nullptr ||
        config->tasks == nullptr || config->rows == nullptr || config->slots == nullptr || config->out == nullptr ||
        config->flags == nullptr || config->address == nullptr || config->kind == nullptr ||
        config->scales == nullptr)
        return fail(kBadArgument, "an address of the conductor is null");
    if (config->checked != nullptr && config->checksum == nullptr)
        return fail(kBadArgument, "there are experts to be checked and no checksums");
    if (config->most_picks < 1 || config->most_rows < 1 || config->num_layers < 1 || config->num_experts < 1)
        return fail(kBadArgument, "a size of the conductor is below 1");
    auto* made = new (std::nothrow) Conductor(*config);
    if (made == nullptr) return fail(kNoMemory, "no memory for the conductor");
    const int status = made->start();
    if (status != kOk) {
        delete made;
        return status;
    }
    *conductor = made;
    return kOk;
}

STRATA_API int strata_conductor_begin(void* conductor, int wait_ms) {
    return static_cast<Conductor*>(conductor)->begin(wait_ms);
}

STRATA_API int strata_conductor_end(void* conductor) { return static_cast<Conductor*>(conductor)->end(); }

STRATA_API int strata_conductor_settle(void* conductor, int wait_ms) {
    return static_cast<Conductor*>(conductor)->settle(wait_ms);
}

STRATA_API void strata_conductor_abort(void* conductor) { static_cast<Conductor*>(conductor)->abort(); }

STRATA_API void strata_conductor_close(void* conductor) { delete static_cast<Conductor*>(conductor); }

STRATA_API void strata_conductor_fault(void* conductor, int kind, int number, int ms) {
    static_cast<Conductor*>(conductor)->plan_fault(kind, number, ms);
}

STRATA_API void strata_conductor_counters(void* conductor, StrataConductorCounters* counters) {
    *counters = static_cast<Conductor*>(conductor)->counters();
}
