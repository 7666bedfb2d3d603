#include "picks.h"

#include <cstring>
#include <new>
#include <vector>

#include "expert.h"

namespace {

// Fills in one expert's address and kind.
void look_up(const StrataPickTables& tables, int64_t expert, StrataExpertTask& task, uint8_t& kind,
             StrataPickResult& result) {
    const int32_t slot = tables.slot_of[expert];
    if (slot >= 0) {
        if (slot < tables.num_slots && tables.generation[slot] == tables.stamp_of[expert] &&
            tables.owner[slot] == expert) {
            task.blob = tables.slots_address + static_cast<uint64_t>(slot) * tables.stride;
            kind = 0;
            return;
        }
        ++result.num_stale;
    }
    task.blob = tables.fallback[expert];
    kind = tables.fallback_kind[expert];
}

}  // namespace

int strata_group_picks(const StrataPickTables* tables, int64_t layer, const int32_t* ids, int64_t rows, int64_t top_k,
                       StrataPickResult* result) {
    using namespace strata;
    const int64_t experts = tables->num_experts;
    if (layer < 0 || layer >= tables->num_layers || rows < 0 || top_k < 1)
        return fail(kBadArgument, "layer %lld of %lld, %lld rows of %lld picks", static_cast<long long>(layer),
                    static_cast<long long>(tables->num_layers), static_cast<long long>(rows),
                    static_cast<long long>(top_k));
    const int64_t picks = rows * top_k;
    static thread_local std::vector<int32_t> next;  // where the next pick of each expert goes
    try {
        next.assign(static_cast<size_t>(experts) + 1, 0);
    } catch (const std::bad_alloc&) {
        return fail(kNoMemory, "no memory to group the picks of %lld experts", static_cast<long long>(experts));
    }
    for (int64_t p = 0; p < picks; ++p) {
        const int32_t id = ids[p];
        if (id < 0 || id >= experts)
            return fail(kBadArgument, "expert %d of %lld was picked", id, static_cast<long long>(experts));
        ++next[id + 1];
    }
    std::memset(result->by_kind, 0, sizeof result->by_kind);
    result->num_stale = 0;
    int64_t count = 0;
    StrataExpertTask* tasks = static_cast<StrataExpertTask*>(result->tasks);
    for (int64_t e = 0; e < experts; ++e) {
        const int32_t size = next[e + 1];
        next[e + 1] += next[e];
        if (size == 0) continue;
        const int64_t expert = layer * experts + e;
        StrataExpertTask& task = tasks[count];
        look_up(*tables, expert, task, result->kinds[count], *result);
        std::memcpy(task.scales, tables->scales + 3 * expert, sizeof task.scales);
        task.first = next[e];
        task.count = size;
        task.row = 0;
        ++result->by_kind[result->kinds[count] & 7];
        tables->counts[expert] += size;
        result->experts[count++] = static_cast<int32_t>(e);
    }
    for (int64_t p = 0; p < picks; ++p) {
        const int32_t at = next[ids[p]]++;
        result->rows[at] = static_cast<int32_t>(p / top_k);
        result->places[at] = static_cast<int32_t>(p);
    }
    result->num_tasks = count;
    return kOk;
}
