// The expert kernels, written once over a small set of vector operations. A level's file defines `Isa` inside an
// anonymous namespace of its own and includes this text there, so that no function compiled for one instruction set
// can be linked into another. For the same reason nothing here uses templates of the standard library.
//
// One lane is one output row; the 16 rows of a group are kHalves vectors. A lane sums in the defined order, so the
// number of lanes, of rows at once and of threads changes nothing.

#include "expert_formats.h"

// The results of one group for each of R rows of `width` weights: the segments' sums in order, times the tensor scale.
template <class Format, int R>
STRATA_INLINE inline void multiply(const uint8_t* group, long width, const typename Format::Row* rows, float unit,
                                   Four<Floats>* total) {
    constexpr int P = Format::template kPartsAtOnce<R>;
    const long superblocks = ExpertShape::up_to(width, exact::kSuperblock) / exact::kSuperblock;
    alignas(64) uint8_t cleaned[Format::kBytes];
    const int rest = static_cast<int>(width % exact::kSuperblock);
    const long padded = rest == 0 ? -1 : superblocks - 1;
    if (rest != 0) Format::clean(group + padded * Format::kBytes, rest, cleaned);
    each_half([&](auto half) STRATA_INLINE {
        each<R>([&](auto r) STRATA_INLINE { total[half].template at<r>() = Isa::zero(); });
    });
    for (long first = 0; first < superblocks; first += kSegmentSuperblocks) {
        const long last = first + kSegmentSuperblocks;
        const long end = last < superblocks ? last : superblocks;
        const auto segment = [&](auto part) STRATA_INLINE {
            Sums<P> acc;
            each<P>([&](auto q) STRATA_INLINE {
                each<R>([&](auto r) STRATA_INLINE { acc.part[q].template at<r>() = Isa::zero(); });
            });
            for (long s = first; s < end; ++s) {
                const uint8_t* weights = group + s * Format::kBytes;
                if (part == 0) ask_ahead(weights, Format::kBytes);
                Format::template add<R, P>(s == padded ? cleaned : weights, part, rows, s, acc);
            }
            each<P>([&](auto q) STRATA_INLINE {
                each<R>([&](auto r) STRATA_INLINE {
                    Floats& sum = total[part + q].template at<r>();
                    sum = Isa::sum(sum, acc.part[q].template at<r>());
                });
            });
        };
        if constexpr (P == kHalves) segment(Index<0>{});
        else each_half(segment);
    }
    each_half([&](auto half) STRATA_INLINE {
        each<R>([&](auto r) STRATA_INLINE {
            Floats& sum = total[half].template at<r>();
            sum = Isa::product(sum, Isa::spread(&unit));
        });
    });
}

// Rows that the results of one decoding are kept for.
constexpr int kMostRows = 64;
// Rows of one step over a panel: with two parts two, so that sums and weights fit sixteen registers.
constexpr int kPanelRows = kHalves == 2 ? 2 : 4;

// The same for `count` rows, up to kMostRows, with each segment decoded once.
template <class Format>
void multiply_many(const uint8_t* group, long width, const typename Format::Row* rows, int count, float unit,
                   float (*out)[exact::kGroup]) {
    constexpr long kBlocks = exact::kSegment / exact::kGroup;
    const long blocks = ExpertShape::up_to(width, exact::kGroup) / exact::kGroup;  // those of padding are left out
    typename Format::Panel panel;
    for (long first = 0; first < blocks; first += kBlocks) {
        const long left = blocks - first;
        const int now = static_cast<int>(left < kBlocks ? left : kBlocks);
        const uint8_t* weights = group + first / 4 * Format::kBytes;
        ask_ahead(weights, (now + 3) / 4 * Format::kBytes);
        Format::decode(weights, now, panel);
        const auto step = [&](int r0, auto R) STRATA_INLINE {
            Sums<kHalves> acc;
            each<kHalves>([&](auto q) STRATA_INLINE {
                each<R>([&](auto r) STRATA_INLINE { acc.part[q].template at<r>() = Isa::zero(); });
            });
            Format::template add_panel<R>(panel, now, rows + r0, first, acc);
            each<kHalves>([&](auto q) STRATA_INLINE {
                each<R>([&](auto r) STRATA_INLINE {
                    float* place = out[r0 + r] + q * kLanes;
                    const Floats before = first == 0 ? Isa::zero() : Isa::load_floats(place);
                    const Floats total = Isa::sum(before, acc.part[q].template at<r>());
                    Isa::store(place, left > now ? total : Isa::product(total, Isa::spread(&unit)));
                });
            });
        };
        int r = 0;
        for (; r + kPanelRows <= count; r += kPanelRows) step(r, Index<kPanelRows>{});
        for (; r < count; ++r) step(r, Index<1>{});
    }
}

// Quantises 16 values. Returns whether all are finite.
template <class Format>
bool prepare_group(const float* x, CodedGroup* out) {
    unsigned largest = 0;
    for (int i = 0; i < exact::kGroup; ++i) {
        const unsigned size = exact::magnitude(x[i]);
        largest = size > largest ? size : largest;
    }
    const exact::GroupScale group = exact::group_scale(largest);
    const int counts = group.scale != 0.0f ? -1 : 0;  // NaN times 0 is no integer
    int8_t codes[exact::kGroup];
    int total = 0;
    for (int i = 0; i < exact::kGroup; ++i) {
        const int code = exact::nearest(exact::product(x[i], group.inverse)) & counts;
        codes[i] = static_cast<int8_t>(code);
        total += code;
    }
    Codes natural;
    __builtin_memcpy(&natural, codes, sizeof natural);
    const Codes arranged = Format::arrange(natural);
    __builtin_memcpy(out->codes, &arranged, sizeof arranged);
    out->scale = group.scale;
    out->correction = Format::correction(total);
    return group.finite;
}

template <class Format>
struct Prepared {
    static bool group(const float* x, long at, void* row) {
        return prepare_group<Format>(x, static_cast<CodedGroup*>(row) + at);
    }
};

template <>
struct Prepared<Bf16> {
    static bool group(const float* x, long at, void* row) {
        float* out = static_cast<float*>(row) + at * exact::kGroup;
        unsigned largest = 0;
        for (int i = 0; i < exact::kGroup; ++i) {
            const unsigned size = exact::magnitude(x[i]);
            largest = size > largest ? size : largest;
            out[i] = x[i];
        }
        return largest < exact::kInfinity;
    }
};

template <class Format>
int prepare(const float* x, long width, long superblocks, void* row) {
    bool finite = true;
    const long groups = superblocks * exact::kSuperblock / exact::kGroup;
    const long whole = width / exact::kGroup;
    for (long at = 0; at < whole; ++at) finite &= Prepared<Format>::group(x + at * exact::kGroup, at, row);
    for (long at = whole; at < groups; ++at) {
        float rest[exact::kGroup] = {};
        for (long i = at * exact::kGroup; i < width; ++i) rest[i - at * exact::kGroup] = x[i];
        finite &= Prepared<Format>::group(rest, at, row);
    }
    return finite ? 0 : 1;
}

void raise_flag(uint8_t* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

// h = silu(gate) * up of one group of one row, of which the first of 16 are there; the others are padding.
template <class Format>
void join(const float* gates, const float* ups, const ExpertShape& shape, long group, void* h, uint8_t* flag) {
    alignas(64) float inside[exact::kGroup];
    for (int i = 0; i < exact::kGroup; ++i) inside[i] = exact::product(exact::silu(gates[i]), ups[i]);
    for (long i = shape.intermediate - group * exact::kGroup; i < exact::kGroup; ++i) inside[i] = 0.0f;
    if (!Prepared<Format>::group(inside, group, h)) raise_flag(flag);
}

// One group of gate and up for R rows; h receives 16 activations a row.
template <class Format, int R>
void gate_up_group(const ExpertShape& shape, const uint8_t* blob, float gate_unit, float up_unit, long group,
                   const void* const* x, void* const* h, uint8_t* const* flags) {
    const uint8_t* weights = blob + group * 2 * shape.wide_bytes();
    typename Format::Row rows[R];
    for (int r = 0; r < R; ++r) rows[r] = static_cast<typename Format::Row>(x[r]);
    alignas(64) float values[2][R][exact::kGroup];
    for (int part = 0; part < 2; ++part) {
        Four<Floats> total[kHalves];
        multiply<Format, R>(weights + part * shape.wide_bytes(), shape.hidden, rows,
                            part == 0 ? gate_unit : up_unit, total);
        each_half([&](auto half) STRATA_INLINE {
            each<R>([&](auto r) STRATA_INLINE {
                Isa::store(values[part][r] + half * kLanes, total[half].template at<r>());
            });
        });
    }
    for (int r = 0; r < R; ++r) join<Format>(values[0][r], values[1][r], shape, group, h[r], flags[r]);
}

template <class Format>
void gate_up_many(const ExpertShape& shape, const uint8_t* blob, float gate_unit, float up_unit, long group,
                  const void* const* x, void* const* h, int count, uint8_t* const* flags) {
    const uint8_t* weights = blob + group * 2 * shape.wide_bytes();
    typename Format::Row rows[kMostRows];
    for (int r = 0; r < count; ++r) rows[r] = static_cast<typename Format::Row>(x[r]);
    alignas(64) float gates[kMostRows][exact::kGroup], ups[kMostRows][exact::kGroup];
    multiply_many<Format>(weights, shape.hidden, rows, count, gate_unit, gates);
    multiply_many<Format>(weights + shape.wide_bytes(), shape.hidden, rows, count, up_unit, ups);
    for (int r = 0; r < count; ++r) join<Format>(gates[r], ups[r], shape, group, h[r], flags[r]);
}

template <class Format>
void gate_up(const ExpertShape& shape, const uint8_t* blob, float gate_scale, float up_scale, long begin, long end,
             const void* const* x, void* const* h, long count, uint8_t* const* flags) {
    const float gate_unit = Format::unit(gate_scale), up_unit = Format::unit(up_scale);
    for (long group = begin; group < end; ++group) {
        long r = 0;
        if constexpr (Format::kHasPanel)
            for (; count - r > kRowsAtOnce; r += kMostRows) {
                const int now = static_cast<int>(count - r < kMostRows ? count - r : kMostRows);
                gate_up_many<Format>(shape, blob, gate_unit, up_unit, group, x + r, h + r, now, flags + r);
            }
        for (; r < count; r += kRowsAtOnce) switch (count - r) {
                case 1: gate_up_group<Format, 1>(shape, blob, gate_unit, up_unit, group, x + r, h + r, flags + r); break;
                case 2: gate_up_group<Format, 2>(shape, blob, gate_unit, up_unit, group, x + r, h + r, flags + r); break;
                case 3: gate_up_group<Format, 3>(shape, blob, gate_unit, up_unit, group, x + r, h + r, flags + r); break;
                default: gate_up_group<Format, 4>(shape, blob, gate_unit, up_unit, group, x + r, h + r, flags + r);
            }
    }
    if (end < shape.inner_groups()) return;
    // The last groups of a row that is no multiple of 64 wide.
    const float zeros[exact::kGroup] = {};
    for (long at = end; at < shape.inner_superblocks() * exact::kSuperblock / exact::kGroup; ++at)
        for (long r = 0; r < count; ++r) Prepared<Format>::group(zeros, at, h[r]);
}

// Writes a group's 16 results (part(half) gives them) to y, the last group cut to the width.
template <class Part>
STRATA_INLINE inline void deliver(long hidden, long group, float* y, uint8_t* flag, Part&& part) {
    const long first = group * exact::kGroup, width = hidden - first;
    bool finite = true;
    if (width >= exact::kGroup) {
        each_half([&](auto half) STRATA_INLINE { finite &= Isa::store_finite(y + first + half * kLanes, part(half)); });
    } else {
        alignas(64) float last[exact::kGroup];
        each_half([&](auto half) STRATA_INLINE { Isa::store(last + half * kLanes, part(half)); });
        for (long i = 0; i < width; ++i) {
            const bool is_number = exact::is_finite(last[i]);
            y[first + i] = is_number ? last[i] : 0.0f;
            finite &= is_number;
        }
    }
    if (!finite) raise_flag(flag);
}

template <class Format, int R>
void down_group(const ExpertShape& shape, const uint8_t* blob, float unit, long group, const void* const* h,
                float* const* y, uint8_t* const* flags) {
    typename Format::Row rows[R];
    for (int r = 0; r < R; ++r) rows[r] = static_cast<typename Format::Row>(h[r]);
    Four<Floats> total[kHalves];
    multiply<Format, R>(blob + shape.down_offset() + group * shape.narrow_bytes(), shape.intermediate, rows, unit, total);
    each<R>([&](auto r) STRATA_INLINE {
        deliver(shape.hidden, group, y[r], flags[r],
                [&](auto half) STRATA_INLINE { return total[half].template at<r>(); });
    });
}

template <class Format>
void down_many(const ExpertShape& shape, const uint8_t* blob, float unit, long group, const void* const* h,
               float* const* y, int count, uint8_t* const* flags) {
    typename Format::Row rows[kMostRows];
    for (int r = 0; r < count; ++r) rows[r] = static_cast<typename Format::Row>(h[r]);
    alignas(64) float results[kMostRows][exact::kGroup];
    multiply_many<Format>(blob + shape.down_offset() + group * shape.narrow_bytes(), shape.intermediate, rows, count,
                          unit, results);
    for (int r = 0; r < count; ++r)
        deliver(shape.hidden, group, y[r], flags[r],
                [&](auto half) STRATA_INLINE { return Isa::load_floats(results[r] + half * kLanes); });
}

template <class Format>
void down(const ExpertShape& shape, const uint8_t* blob, float scale, long begin, long end, const void* const* h,
          float* const* y, long count, uint8_t* const* flags) {
    const float unit = Format::unit(scale);
    for (long group = begin; group < end; ++group) {
        long r = 0;
        if constexpr (Format::kHasPanel)
            for (; count - r > kRowsAtOnce; r += kMostRows) {
                const int now = static_cast<int>(count - r < kMostRows ? count - r : kMostRows);
                down_many<Format>(shape, blob, unit, group, h + r, y + r, now, flags + r);
            }
        for (; r < count; r += kRowsAtOnce) switch (count - r) {
                case 1: down_group<Format, 1>(shape, blob, unit, group, h + r, y + r, flags + r); break;
                case 2: down_group<Format, 2>(shape, blob, unit, group, h + r, y + r, flags + r); break;
                case 3: down_group<Format, 3>(shape, blob, unit, group, h + r, y + r, flags + r); break;
                default: down_group<Format, 4>(shape, blob, unit, group, h + r, y + r, flags + r);
            }
    }
}

int combine(const float* const* parts, const float* weights, long k, long width, float* y) {
    unsigned largest = 0;
    for (long first = 0; first < width; first += 64) {
        const int now = static_cast<int>(width - first < 64 ? width - first : 64);
        alignas(64) float acc[64] = {};
        for (long part = 0; part < k; ++part) {
            const float* from = parts[part] + first;
            const float weight = weights[part];
            if (now == 64)
                for (int i = 0; i < 64; ++i) acc[i] = exact::fused(weight, from[i], acc[i]);
            else
                for (int i = 0; i < now; ++i) acc[i] = exact::fused(weight, from[i], acc[i]);
        }
        for (int i = 0; i < now; ++i) {
            const unsigned size = exact::magnitude(acc[i]);
            largest = size > largest ? size : largest;
            y[first + i] = size < exact::kInfinity ? acc[i] : 0.0f;
        }
    }
    return largest < exact::kInfinity ? 0 : 1;
}

uint64_t add_words(const uint64_t* words, long count) {
    uint64_t a = 0, b = 0, c = 0, d = 0;
    const long quarter = count / 4;  // four streams of a page or more: one alone does not fill the memory's queues
    for (long i = 0; i < quarter; ++i) {
        a += words[i];
        b += words[quarter + i];
        c += words[2 * quarter + i];
        d += words[3 * quarter + i];
    }
    for (long i = 4 * quarter; i < count; ++i) a += words[i];
    return a + b + c + d;
}

#pragma GCC diagnostic pop
#undef STRATA_INLINE

const ExpertKernels* table(int format) {
    static const ExpertKernels tables[kExpertFormats] = {
        {prepare<Nvfp4>, gate_up<Nvfp4>, down<Nvfp4>, combine, add_words, kRowsAtOnce, kPanelRows, kMostRows},
        {prepare<Q8>, gate_up<Q8>, down<Q8>, combine, add_words, kRowsAtOnce, kPanelRows, kMostRows},
        {prepare<Bf16>, gate_up<Bf16>, down<Bf16>, combine, add_words, kRowsAtOnce, kPanelRows, kMostRows},
    };
    return format >= 0 && format < kExpertFormats ? &tables[format] : nullptr;
}
