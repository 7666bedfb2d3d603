// Weights that are computed instead of read: any byte of a made-up model is a function of a key and its place.
//
// Lives beside the stager, whose threads write these bytes straight to where an expert is wanted, so that a model of any
// size can be measured with no file and no second copy. Word i (8 bytes, little-endian) of a key is the two halves of a
// 128-bit product folded together: one multiplication for 8 bytes, the same on every machine and for any number of
// threads. It must not know a model: keys and masks are arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.h"

// Words of a recipe: key, payload bytes, bytes of a superblock, bytes of codes at its start, then what codes and scales
// are and-ed and or-ed with (64 bits, repeated).
enum StrataRecipeWord : int {
    kRecipeKey = 0,
    kRecipePayload = 1,
    kRecipeSuperblock = 2,
    kRecipeCodes = 3,
    kRecipeCodeAnd = 4,
    kRecipeCodeOr = 5,
    kRecipeScaleAnd = 6,
    kRecipeScaleOr = 7,
    kRecipeWords = 8,
};

// Fills a blob of `nbytes` (a multiple of 64, at an address of 16) as the recipe says; zeros behind the payload. All
// sizes are multiples of 64 but the payload and codes, multiples of 8. A `StrataFill` (stager.h).
STRATA_API int strata_synthetic_blob(void* target, size_t nbytes, const uint64_t* recipe);

// Values `first` .. `first + count` of a key, on the calling thread: whole numbers spread evenly over [-amplitude, amplitude] (at
// most 127) times 2^exponent. `type`: 0 int8 (the numbers themselves), 1 BF16, 2 FP32; exact in all three. `first` is a
// multiple of 8.
STRATA_API int strata_synthetic_values(void* target, long first, long count, uint64_t key, int amplitude, int exponent,
                                       int type);

// Rows `first` .. `first + count` of a q8_0 table as its file holds them (gather.h), each with its check word: codes as
// above, every scale 2^exponent.
STRATA_API int strata_synthetic_table(void* target, int64_t first, int64_t count, int64_t columns, uint64_t key,
                                      int amplitude, int exponent);
