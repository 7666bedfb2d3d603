#include "stager.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "checksum.h"

namespace {

constexpr size_t kLine = 64;
// Reads are cut so that a signal or a slow drive never holds more than this in one system call.
constexpr size_t kReadPiece = size_t{8} << 20;
// What the page cache holds is read and summed in pieces that stay in a second cache between the two.
constexpr size_t kCachedPiece = 256 * 1024;

struct Job {
    uint64_t ticket;
    void* target;
    const void* source;  // null for a read
    size_t nbytes;
    uint64_t offset;
    uint64_t expected;
    int file;
    bool bypass;
    bool checked;
    StrataFill fill;  // null unless the bytes are computed
    uint64_t recipe[kFillWords];
};

// A line at a time past the caches, so that staging does not evict what the kernels are using. The target's line is
// not read first, which saves a third of the memory traffic of an ordinary copy.
void copy_past_caches(void* target, const void* source, size_t nbytes) {
#if defined(__SSE2__)
    char* out = static_cast<char*>(target);
    const char* in = static_cast<const char*>(source);
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
    if (nbytes < 4 * kLine + head) {
        std::memcpy(target, source, nbytes);
        return;
    }
    std::memcpy(out, in, head);
    out += head, in += head, nbytes -= head;
    for (; nbytes >= kLine; nbytes -= kLine, out += kLine, in += kLine) {
        _mm_prefetch(in + 8 * kLine, _MM_HINT_NTA);
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 16));
        const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 32));
        const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 48));
        _mm_stream_si128(reinterpret_cast<__m128i*>(out), a);
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + 16), b);
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + 32), c);
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + 48), d);
    }
    _mm_sfence();  // the stores are visible before the ticket is complete
    std::memcpy(out, in, nbytes);
#else
    std::memcpy(target, source, nbytes);
#endif
}

// Bytes that the page cache held, read to the front of the job's target and taken by `sum`; whole pieces, or the end.
size_t read_cached(const Job& job, strata::RunningChecksum& sum) {
    size_t done = 0;
#if defined(RWF_NOWAIT) && defined(O_DIRECT)
    const int flags = fcntl(job.file, F_GETFL);
    if (flags < 0 || (flags & O_DIRECT) != 0) return 0;
    char* out = static_cast<char*>(job.target);
    while (done < job.nbytes) {
        const size_t piece = job.nbytes - done < kCachedPiece ? job.nbytes - done : kCachedPiece;
        iovec vector{out + done, piece};
        const ssize_t got = preadv2(job.file, &vector, 1, static_cast<off_t>(job.offset + done), RWF_NOWAIT);
        if (got != static_cast<ssize_t>(piece)) break;  // the drive has the rest, or the file ends: read it plainly
        sum.take(out + done, piece);
        done += piece;
    }
#endif
    return done;
}

int read_all(const Job& job) {
    strata::RunningChecksum sum;
    const size_t cached = job.checked ? read_cached(job, sum) : 0;
    char* out = static_cast<char*>(job.target) + cached;
    size_t left = job.nbytes - cached;
    uint64_t offset = job.offset + cached;
    while (left != 0) {
        const ssize_t got = pread(job.file, out, left < kReadPiece ? left : kReadPiece, static_cast<off_t>(offset));
        if (got < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (got == 0) return kTicketTruncated;
        out += got, offset += static_cast<uint64_t>(got), left -= static_cast<size_t>(got);
    }
    if (!job.checked) return kTicketDone;
    if (cached < job.nbytes) sum.take(static_cast<char*>(job.target) + cached, job.nbytes - cached);
    return sum.finish() == job.expected ? kTicketDone : kTicketDamaged;
}

int run(const Job& job) {
    if (job.fill != nullptr) {
        return job.fill(job.target, job.nbytes, job.recipe) == strata::kOk ? kTicketDone : kTicketRefused;
    }
    if (job.source == nullptr) return read_all(job);
    if (job.bypass) {
        copy_past_caches(job.target, job.source, job.nbytes);
    } else {
        std::memcpy(job.target, job.source, job.nbytes);
    }
    return kTicketDone;
}

}  // namespace

struct StrataStager {
    std::mutex mutex;
    std::condition_variable work;
    std::condition_variable finished;
    std::deque<Job> jobs;
    std::deque<bool> complete;    // of the tickets from `oldest` on
    std::map<uint64_t, int> bad;  // tickets that failed
    uint64_t oldest = 1;
    uint64_t next = 1;
    bool ending = false;
    std::vector<std::thread> threads;

    void serve() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            work.wait(lock, [this] { return ending || !jobs.empty(); });
            if (jobs.empty()) return;
            const Job job = jobs.front();
            jobs.pop_front();
            lock.unlock();
            const int state = run(job);
            lock.lock();
            if (state != kTicketDone) bad[job.ticket] = state;
            complete[job.ticket - oldest] = true;
            while (!complete.empty() && complete.front()) {
                complete.pop_front();
                ++oldest;
            }
            finished.notify_all();
        }
    }

    uint64_t submit(Job job) {
        std::lock_guard<std::mutex> guard(mutex);
        job.ticket = next++;
        complete.push_back(false);
        jobs.push_back(job);
        work.notify_one();
        return job.ticket;
    }

    bool is_complete(uint64_t ticket) const { return ticket < oldest || complete[ticket - oldest]; }

    int state(uint64_t ticket) const {
        if (!is_complete(ticket)) return kTicketPending;
        const auto found = bad.find(ticket);
        return found == bad.end() ? kTicketDone : found->second;
    }

    void end() {
        {
            std::lock_guard<std::mutex> guard(mutex);
            ending = true;
        }
        work.notify_all();
        for (std::thread& thread : threads) thread.join();
    }
};

StrataStager* strata_stager_create(int threads) {
    if (threads < 1 || threads > 256) {
        strata::fail(strata::kBadArgument, "%d stager threads; 1 to 256 are possible", threads);
        return nullptr;
    }
    StrataStager* stager = new (std::nothrow) StrataStager;
    if (stager == nullptr) {
        strata::fail(strata::kNoMemory, "no memory for the stager");
        return nullptr;
    }
    try {
        for (int index = 0; index < threads; ++index) stager->threads.emplace_back([stager] { stager->serve(); });
    } catch (const std::system_error& error) {
        stager->end();
        delete stager;
        strata::fail(strata::kUnavailable, "%d stager threads cannot be started: %s", threads, error.what());
        return nullptr;
    }
    return stager;
}

void strata_stager_destroy(StrataStager* stager) {
    if (stager == nullptr) return;
    stager->end();
    delete stager;
}

int strata_stager_threads(const StrataStager* stager) { return static_cast<int>(stager->threads.size()); }

uint64_t strata_stager_copy(StrataStager* stager, void* target, const void* source, size_t nbytes, int bypass) {
    Job job{};
    job.target = target;
    job.source = source;
    job.nbytes = nbytes;
    job.bypass = bypass != 0;
    return stager->submit(job);
}

uint64_t strata_stager_read(StrataStager* stager, int file, uint64_t offset, void* target, size_t nbytes, int checked,
                            uint64_t expected) {
    Job job{};
    job.target = target;
    job.nbytes = nbytes;
    job.offset = offset;
    job.file = file;
    job.checked = checked != 0;
    job.expected = expected;
    return stager->submit(job);
}

uint64_t strata_stager_compute(StrataStager* stager, StrataFill fill, const uint64_t* recipe, void* target,
                               size_t nbytes) {
    Job job{};
    job.target = target;
    job.nbytes = nbytes;
    job.fill = fill;
    std::memcpy(job.recipe, recipe, sizeof job.recipe);
    return stager->submit(job);
}

int strata_stager_query(StrataStager* stager, uint64_t ticket) {
    std::lock_guard<std::mutex> guard(stager->mutex);
    return stager->state(ticket);
}

int strata_stager_wait(StrataStager* stager, uint64_t ticket) {
    std::unique_lock<std::mutex> lock(stager->mutex);
    stager->finished.wait(lock, [stager, ticket] { return stager->is_complete(ticket); });
    return stager->state(ticket);
}
