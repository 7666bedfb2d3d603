// The routed experts of one layer as one job of the pool: rows are prepared once, then every expert's gate and up,
// then every expert's down, cut into units of like cost that threads claim in order.
//
// A unit of down waits until its expert's gate and up are complete. Units are claimed in rising order and all gate
// and up units come first, so whatever is waited for is already being computed by another thread.
#include "expert.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "blocks.h"
#include "pool.h"
#include "scratch.h"
#include "status.h"

namespace strata {

const ExpertKernels* expert_kernels(int format) {
    const ExpertKernels* found = nullptr;
    switch (isa_level()) {
#if defined(STRATA_HAVE_AVX512)
        case kAvx512: found = expert_kernels_avx512(format); break;
#endif
#if defined(STRATA_HAVE_AVXVNNI)
        case kAvxVnni: found = expert_kernels_avxvnni(format); break;
#endif
#if defined(STRATA_HAVE_AVX2)
        case kAvx2: found = expert_kernels_avx2(format); break;
#endif
        default: break;
    }
    return found != nullptr ? found : expert_kernels_scalar(format);
}

ExpertBlocks expert_blocks() {
    const ExpertKernels& kernels = *expert_kernels(kNvfp4);
    return ExpertBlocks{kernels.rows_at_once, kernels.panel_rows, kernels.most_rows};
}

}  // namespace strata

namespace strata {
namespace {

// The bytes of weights below which a unit is not cut further: about 5 us of one core, fifty times what a claim
// costs; and how many units a thread should get at least, so that the last one is a small part.
constexpr double kLeastUnit = 24.0 * 1024;
constexpr double kUnitsPerThread = 24;
constexpr long kRowsPerUnit = 4;
constexpr long kRowParts = 4;  // of a single row: all threads wait for it
// Bytes that a waiting thread asks for between two looks at what it waits for.
constexpr long kBrought = 1024;
// Words that a thread sums between two claims: 1 MiB.
constexpr long kSumWords = 131072;

// Memory of a calling thread.
thread_local Scratch scratch;

struct Unit {
    int32_t task;  // below 0: part -1 - task of rows [begin, end) is prepared
    int32_t begin, end;
    bool down;
};

struct Job {
    ExpertShape shape;
    const ExpertKernels* kernels;
    const StrataExpertTask* tasks;
    const float* x;
    uint8_t* flags;
    uint8_t* prepared;  // x_rows prepared rows
    const void** rows;  // of each pick: its prepared row, its inner row, its result, its flag
    void** inner;
    float** results;
    uint8_t** pick_flags;
    std::atomic<int32_t>* missing;  // of each task: gate and up units that are not complete
    std::atomic<int32_t> rows_missing{0};
    long row_parts = 1;  // of a row that are prepared by themselves
    Unit* units;
    long num_units;
    std::atomic<long> next{0};
};

// Waits until nothing is missing, and meanwhile brings the weights that are multiplied next to the cache: memory would
// idle while the rows are prepared by a few threads, and while the last of gate and up are computed by a few. False: some
// thread has failed, and with it the job; what is waited for may never come.
bool await_zero(const std::atomic<int32_t>& missing, const uint8_t* weights, long nbytes) {
    if (missing.load(std::memory_order_acquire) == 0) return true;
    const long since = pool_clock();
    for (long at = 0; at < nbytes && missing.load(std::memory_order_acquire) != 0; at += kBrought)
        for (long line = at; line < std::min(at + kBrought, nbytes); line += 64)
            __builtin_prefetch(weights + line, 0, 2);  // to the second-level cache; never a fault
    for (long spins = 0; missing.load(std::memory_order_acquire) != 0; ++spins) {
        if (job_failed()) return false;
        if (spins > 2000) sched_yield();  // whoever computes it may have lost its processor
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
    count_waiting(since);
    return true;
}

void compute_unit(Job& job, const Unit& unit) {
    const ExpertShape& shape = job.shape;
    if (unit.task < 0) {
        const long superblocks = shape.hidden_superblocks(), part = -1 - unit.task;
        const long from = superblocks * part / job.row_parts, until = superblocks * (part + 1) / job.row_parts;
        const long begin = from * exact::kSuperblock, end = std::min(shape.hidden, until * exact::kSuperblock);
        for (long row = unit.begin; row < unit.end; ++row)
            if (job.kernels->prepare(job.x + row * shape.hidden + begin, end - begin, until - from,
                                     job.prepared + row * shape.row_bytes(superblocks) + shape.row_bytes(from)))
                __atomic_store_n(job.flags + row, 1, __ATOMIC_RELAXED);
        job.rows_missing.fetch_sub(1, std::memory_order_acq_rel);
        return;
    }
    const StrataExpertTask& task = job.tasks[unit.task];
    const auto* blob = reinterpret_cast<const uint8_t*>(task.blob);
    const long groups = unit.end - unit.begin;
    if (!unit.down) {
        const long group_bytes = 2 * shape.wide_bytes();
        if (!await_zero(job.rows_missing, blob + unit.begin * group_bytes, groups * group_bytes)) return;
        job.kernels->gate_up(shape, blob, task.scales[0], task.scales[1], unit.begin, unit.end, job.rows + task.first,
                             job.inner + task.first, task.count, job.pick_flags + task.first);
        job.missing[unit.task].fetch_sub(1, std::memory_order_acq_rel);
        return;
    }
    const uint8_t* weights = blob + shape.down_offset() + unit.begin * shape.narrow_bytes();
    if (!await_zero(job.missing[unit.task], weights, groups * shape.narrow_bytes())) return;
    job.kernels->down(shape, blob, task.scales[2], unit.begin, unit.end, job.inner + task.first,
                      job.results + task.first, task.count, job.pick_flags + task.first);
}

int work_on(void* context, int, int) {
    Job& job = *static_cast<Job*>(context);
    for (long i; !job_failed() && (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.num_units;)
        compute_unit(job, job.units[i]);
    return kOk;
}

// Cost of a group, in bytes of weights that are read: each four rows beyond the first cost about one more reading.
double cost(long bytes, long count) { return static_cast<double>(bytes) * static_cast<double>((count + 3) / 4); }

// Groups per unit so that a unit costs about `target`.
long groups_per_unit(long groups, double group_cost, double target) {
    const double wanted = target / group_cost;
    if (wanted >= static_cast<double>(groups)) return groups;
    const long parts = std::max(1L, static_cast<long>(static_cast<double>(groups) / std::max(wanted, 1.0) + 0.5));
    return (groups + parts - 1) / parts;
}

int check_task(const StrataExpertTask& task, long index, long picks) {
    if (task.blob == 0) return fail(kBadArgument, "expert task %ld has no address", index);
    if (task.blob % 64 != 0)
        return fail(kBadArgument, "expert task %ld: address %#llx is not aligned to 64 bytes", index,
                    static_cast<unsigned long long>(task.blob));
    if (task.first < 0 || task.count < 0 || task.first > picks - task.count)
        return fail(kBadArgument, "expert task %ld: picks %d to %lld of %ld", index, task.first,
                    static_cast<long long>(task.first) + task.count, picks);
    for (float scale : task.scales)
        if (!(scale > 0.0f) || !std::isfinite(scale))
            return fail(kBadArgument, "expert task %ld: a tensor scale is not finite and above zero", index);
    return kOk;
}

int check_picks(const int32_t* rows, const int32_t* slots, long picks, long x_rows, long out_slots) {
    for (long i = 0; i < picks; ++i) {
        if (rows[i] < 0 || rows[i] >= x_rows)
            return fail(kBadArgument, "pick %ld: row %d of %ld", i, rows[i], x_rows);
        if (slots[i] < 0 || slots[i] >= out_slots)
            return fail(kBadArgument, "pick %ld: result %d of %ld", i, slots[i], out_slots);
    }
    return kOk;
}

// How the units of a call are cut; counted first, then written.
struct Cut {
    long rows_units = 0, units = 0;
    double target = 0;
};

Cut plan_units(const ExpertShape& shape, const StrataExpertTask* tasks, long num_tasks, long x_rows, Unit* units,
               std::atomic<int32_t>* missing, double target, long row_parts) {
    Cut cut;
    auto add = [&](long task, long begin, long end, bool down) {
        if (units != nullptr)
            units[cut.units] = {static_cast<int32_t>(task), static_cast<int32_t>(begin), static_cast<int32_t>(end), down};
        ++cut.units;
    };
    for (long row = 0; row < x_rows; row += kRowsPerUnit)
        for (long part = 0; part < row_parts; ++part)
            add(-1 - part, row, std::min(row + kRowsPerUnit, x_rows), false);
    cut.rows_units = cut.units;
    for (int down = 0; down < 2; ++down)
        for (long t = 0; t < num_tasks; ++t) {
            if (tasks[t].count == 0) continue;
            const long groups = down ? shape.hidden_groups() : shape.inner_groups();
            const long bytes = down ? shape.narrow_bytes() : 2 * shape.wide_bytes();
            const long step = groups_per_unit(groups, cost(bytes, tasks[t].count), target);
            for (long group = 0; group < groups; group += step) add(t, group, std::min(group + step, groups), down != 0);
            if (!down && missing != nullptr) missing[t].store(static_cast<int32_t>((groups + step - 1) / step));
        }
    return cut;
}

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

int compute(Job& job, const StrataExpertTask* tasks, long num_tasks, const int32_t* rows, const int32_t* slots,
            long picks, long x_rows, float* out) {
    const ExpertShape& shape = job.shape;
    double total = 0;
    for (long t = 0; t < num_tasks; ++t) total += cost(shape.payload_bytes(), tasks[t].count);
    const double target = std::max(kLeastUnit, total / (pool_threads() * kUnitsPerThread));
    if (x_rows == 1) job.row_parts = std::min(kRowParts, shape.hidden_superblocks());
    const Cut cut = plan_units(shape, tasks, num_tasks, x_rows, nullptr, nullptr, target, job.row_parts);

    const size_t row_bytes = aligned(shape.row_bytes(shape.hidden_superblocks()));
    const size_t inner_bytes = aligned(shape.row_bytes(shape.inner_superblocks()));
    const size_t sizes[] = {row_bytes * x_rows,         inner_bytes * picks,        sizeof(void*) * picks,
                            sizeof(void*) * picks,      sizeof(void*) * picks,      sizeof(void*) * picks,
                            sizeof(std::atomic<int32_t>) * num_tasks, sizeof(Unit) * cut.units};
    size_t bytes = 64;
    for (size_t size : sizes) bytes += aligned(size);
    auto* memory = static_cast<uint8_t*>(scratch.take(bytes));
    if (memory == nullptr) return fail(kNoMemory, "no memory for %zu bytes of expert scratch", bytes);
    uint8_t* parts[8];
    for (int i = 0; i < 8; ++i) {
        parts[i] = memory;
        memory += aligned(sizes[i]);
    }
    job.prepared = parts[0];
    job.rows = reinterpret_cast<const void**>(parts[2]);
    job.inner = reinterpret_cast<void**>(parts[3]);
    job.results = reinterpret_cast<float**>(parts[4]);
    job.pick_flags = reinterpret_cast<uint8_t**>(parts[5]);
    job.missing = reinterpret_cast<std::atomic<int32_t>*>(parts[6]);
    job.units = reinterpret_cast<Unit*>(parts[7]);
    for (long i = 0; i < picks; ++i) {
        job.rows[i] = job.prepared + rows[i] * shape.row_bytes(shape.hidden_superblocks());
        job.inner[i] = parts[1] + i * inner_bytes;
        job.results[i] = out + static_cast<long>(slots[i]) * shape.hidden;
        job.pick_flags[i] = job.flags + rows[i];
    }
    for (long t = 0; t < num_tasks; ++t) new (job.missing + t) std::atomic<int32_t>(0);
    plan_units(shape, tasks, num_tasks, x_rows, job.units, job.missing, target, job.row_parts);
    job.num_units = cut.units;
    job.rows_missing.store(static_cast<int32_t>(cut.rows_units));
    return run_on_all(&work_on, &job);
}

int check_shape(long hidden, long intermediate, int format) {
    constexpr long kWidest = 1 << 20;
    if (hidden < 1 || hidden > kWidest || intermediate < 1 || intermediate > kWidest)
        return fail(kBadArgument, "an expert of widths %ld and %ld", hidden, intermediate);
    if (format < 0 || format >= kExpertFormats) return fail(kBadArgument, "expert format %d", format);
    return kOk;
}

struct Combine {
    const ExpertKernels* kernels;
    const float *parts, *weights;
    long k, hidden;
    float* y;
    uint8_t* flags;
};

constexpr long kMostPicks = 256;

int combine_rows(void* context, long begin, long end) {
    const Combine& job = *static_cast<Combine*>(context);
    const float* parts[kMostPicks];
    for (long row = begin; row < end; ++row) {
        for (long k = 0; k < job.k; ++k) parts[k] = job.parts + (row * job.k + k) * job.hidden;
        if (job.kernels->combine(parts, job.weights + row * job.k, job.k, job.hidden, job.y + row * job.hidden))
            job.flags[row] = 1;
    }
    return kOk;
}

}  // namespace
}  // namespace strata

STRATA_API int strata_expert_compute(long hidden, long intermediate, int format, const StrataExpertTask* tasks,
                                     long num_tasks, const int32_t* rows, const int32_t* slots, long picks,
                                     const float* x, long x_rows, float* out, long out_slots, uint8_t* flags) {
    using namespace strata;
    int status = check_shape(hidden, intermediate, format);
    if (status != kOk) return status;
    if (num_tasks < 0 || picks < 0 || x_rows < 0 || out_slots < 0 || picks > INT32_MAX)
        return fail(kBadArgument, "a number of tasks, picks, rows or results is out of range");
    if (num_tasks == 0 || picks == 0) return kOk;
    if (tasks == nullptr || rows == nullptr || slots == nullptr || x == nullptr || out == nullptr || flags == nullptr)
        return fail(kBadArgument, "an address of the expert call is null");
    for (long t = 0; t < num_tasks; ++t)
        if ((status = check_task(tasks[t], t, picks)) != kOk) return status;
    if ((status = check_picks(rows, slots, picks, x_rows, out_slots)) != kOk) return status;
    Job job;
    job.shape = {hidden, intermediate, format};
    job.kernels = expert_kernels(format);
    job.tasks = tasks;
    job.x = x;
    job.flags = flags;
    return compute(job, tasks, num_tasks, rows, slots, picks, x_rows, out);
}

// y[row] = sum over k, in order, by fused multiply-add from zero, of weights[row, k] * parts[row, k].
STRATA_API int strata_expert_combine(const float* parts, const float* weights, long rows, long k, long hidden, float* y,
                                     uint8_t* flags) {
    using namespace strata;
    if (rows < 0 || k < 1 || k > kMostPicks || hidden < 1)
        return fail(kBadArgument, "%ld rows of %ld parts (at most %ld) of %ld", rows, k, kMostPicks, hidden);
    if (parts == nullptr || weights == nullptr || y == nullptr || flags == nullptr)
        return fail(kBadArgument, "an address of the sum over experts is null");
    Combine job{expert_kernels(kNvfp4), parts, weights, k, hidden, y, flags};
    return parallel_for(rows, 4, &combine_rows, &job);
}

// The sum of `bytes` (a multiple of 8) at `memory` as 64-bit words, read once by all threads of the pool.
STRATA_API int strata_memory_sum(const void* memory, long bytes, uint64_t* result) {
    using namespace strata;
    if (memory == nullptr || result == nullptr || bytes < 0 || bytes % 8 != 0)
        return fail(kBadArgument, "%ld bytes to be summed", bytes);
    const auto* words = static_cast<const uint64_t*>(memory);
    const ExpertKernels* kernels = expert_kernels(kNvfp4);
    std::atomic<uint64_t> total{0};
    const int status = parallel(bytes / 8, kSumWords, [&](long begin, long end) {
        total.fetch_add(kernels->add_words(words + begin, end - begin), std::memory_order_relaxed);
    });
    *result = total.load();
    return status;
}

// Bytes that a call keeps for the next one on the same thread.
STRATA_API long strata_expert_scratch_bytes(long hidden, long intermediate, int format, long x_rows, long picks) {
    const strata::ExpertShape shape{hidden, intermediate, format};
    const size_t rows = strata::aligned(shape.row_bytes(shape.hidden_superblocks())) * x_rows;
    const size_t inner = strata::aligned(shape.row_bytes(shape.inner_superblocks())) * picks;
    return static_cast<long>(rows + inner + 48 * picks);
}
