// Groups a layer's picks by expert and looks up where each picked expert is read from, in one call a layer.
//
// Lives beside the expert kernel, whose tasks it fills in. A look-up has two levels: an expert's slot, valid only while
// slot and stamp still agree (a slot that changed hands is a miss, never other bytes), else the expert's fallback
// address. Kinds are small numbers of the caller's, 0 for a slot. It must not know what a kind means.
#pragma once

#include <cstdint>

#include "status.h"

// The tables of all experts (index: layer * experts + expert) and of all slots. Owned by the caller, who changes them
// only between calls.
struct StrataPickTables {
    const int32_t* slot_of;        // per expert, -1: none
    const int64_t* stamp_of;       // per expert: its slot's generation at admission
    const int64_t* generation;     // per slot
    const int64_t* owner;          // per slot
    const uint8_t* fallback_kind;  // per expert
    const uint64_t* fallback;      // per expert: address, or 0
    const float* scales;           // per expert: three tensor scales
    int64_t* counts;               // per expert: rows that picked it are added here
    uint64_t slots_address, stride;
    int64_t num_slots, num_experts, num_layers;
};

// What a call writes; arrays have room for rows * top_k entries. `tasks` are `StrataExpertTask` (expert.h).
struct StrataPickResult {
    void* tasks;
    int32_t* experts;
    int32_t* rows;
    int32_t* places;
    uint8_t* kinds;
    int64_t by_kind[8];
    int64_t num_tasks, num_stale;
};

// Groups `ids` [rows, top_k] of `layer`: experts rising, rows of an expert rising; pick (t, k) has place t * top_k + k.
STRATA_API int strata_group_picks(const StrataPickTables* tables, int64_t layer, const int32_t* ids, int64_t rows,
                                  int64_t top_k, StrataPickResult* result);
