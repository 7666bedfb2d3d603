// The block formats of expert weights as kernels read them, over the vector operations of a level (`Isa`). Part of
// expert_kernels.h, which see; each format multiplies one superblock of a group with R prepared rows.
//
//   add<R, P>   adds the products of a superblock to the sums of P parts of the group
//   arrange     codes of 16 activations in the order in which blobs hold weights
//   correction  what starts an integer sum, from the sum of the codes
//   unit        what a total is multiplied by, from the tensor scale
//   clean       a superblock of which only the first weights are a row's, as a copy whose padding changes nothing
//
// Padding adds +0 to a sum, which changes no sum there is, so what lies in its bytes must not matter: a scale that is
// NaN would. Activations of padding are zero, so integer codes of it may be anything.

constexpr int kLanes = Isa::kLanes;
constexpr int kHalves = exact::kGroup / kLanes;
// Rows of activations that one reading of the weights serves: as many as leave accumulators in registers.
constexpr int kRowsAtOnce = 4;
// How far ahead of the weights being used the memory is asked for: a core's own prefetcher follows one stream at less
// than half of what the core can read (12 GB/s against 28 on an AVX2 core; asking 2 KiB ahead gave 19-21). A level may say
// otherwise, and to which cache (3: the first, 2: the second).
#ifndef STRATA_PREFETCH_BYTES
#define STRATA_PREFETCH_BYTES 2048
#define STRATA_PREFETCH_TO 3
#endif
constexpr int kSegmentSuperblocks = exact::kSegment / exact::kSuperblock;

#define STRATA_INLINE __attribute__((always_inline))
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-attributes"  // a vector type as a template argument

using Floats = Isa::Floats;
using Ints = Isa::Ints;
typedef int8_t Codes __attribute__((vector_size(16)));

// Up to four values that stay in registers: an array indexed by a loop would live in memory.
template <class T>
struct Four {
    T v0, v1, v2, v3;

    template <int i>
    T& at() {
        if constexpr (i == 0) return v0;
        else if constexpr (i == 1) return v1;
        else if constexpr (i == 2) return v2;
        else return v3;
    }
};

template <int i>
struct Index {
    static constexpr int value = i;
    constexpr operator int() const { return i; }
};

// Calls f(Index<0>), ..., f(Index<R - 1>).
template <int R, int i = 0, class F>
STRATA_INLINE inline void each(F&& f) {
    f(Index<i>{});
    if constexpr (i + 1 < R) each<R, i + 1>(f);
}

// Calls f for each part of a group. Two parts are unrolled, so that their sums stay in registers as well.
template <class F>
STRATA_INLINE inline void each_half(F&& f) {
    if constexpr (kHalves <= 2)
        each<kHalves>(f);
    else
        for (int half = 0; half < kHalves; ++half) f(half);
}

STRATA_INLINE inline void ask_ahead(const uint8_t* p, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(p + line + STRATA_PREFETCH_BYTES, 0, STRATA_PREFETCH_TO);
}

// Parts of a group that a kernel of R rows computes at once: both where the sums of both fit the registers, because
// they share the broadcast activations.
template <int R>
constexpr int kParts = kHalves == 2 && R <= 2 ? 2 : 1;

// Accumulators of P parts of a group for up to four rows.
template <int P>
struct Sums {
    Four<Floats> part[P];
};

struct Nvfp4 {
    static constexpr long kBytes = 576;
    static constexpr bool kHasPanel = kHalves <= 2;
    using Row = const CodedGroup*;

    template <int R>
    static constexpr int kPartsAtOnce = kParts<R>;

    // Adds the products of one superblock to the sums of parts [part, part + P).
    template <int R, int P>
    STRATA_INLINE static void add(const uint8_t* p, int part, const Row* rows, long superblock, Sums<P>& acc) {
#pragma GCC unroll 4
        for (int block = 0; block < 4; ++block) {
            const long at = superblock * 4 + block;
            const uint8_t* codes = p + block * 128 + part * kLanes * 4;
            Four<Ints> dot[P];
            start<R, P>(rows, at, dot);
            each<2>([&](auto step) STRATA_INLINE {
                each<P>([&](auto q) STRATA_INLINE {
                    Isa::Bytes even, odd;
                    Isa::load_nibbles(codes + step * 64 + q * kLanes * 4, even, odd);
                    each<R>([&](auto r) STRATA_INLINE {
                        Ints& sum = dot[q].template at<r>();
                        sum = Isa::dot_nibbles(sum, even, rows[r][at].codes + step * 8);
                        sum = Isa::dot_nibbles(sum, odd, rows[r][at].codes + step * 8 + 4);
                    });
                });
            });
            each<P>([&](auto q) STRATA_INLINE {
                finish<R>(dot[q], Isa::load_e4m3(p + 512 + block * 16 + (part + q) * kLanes), rows, at, acc.part[q]);
            });
        }
    }

    template <int R, int P>
    STRATA_INLINE static void start(const Row* rows, long at, Four<Ints>* dot) {
        each<P>([&](auto q) STRATA_INLINE {
            each<R>([&](auto r) STRATA_INLINE {
                dot[q].template at<r>() = Isa::start_nibbles(&rows[r][at].correction);
            });
        });
    }

    template <int R>
    STRATA_INLINE static void finish(Four<Ints>& dot, Floats scale, const Row* rows, long at, Four<Floats>& acc) {
        each<R>([&](auto r) STRATA_INLINE {
            const Floats factor = Isa::product(scale, Isa::spread(&rows[r][at].scale));
            Floats& sum = acc.template at<r>();
            sum = Isa::fused(Isa::finish_nibbles(dot.template at<r>()), factor, sum);
        });
    }

    // A segment of a group with its codes and scales decoded, for many rows.
    struct Panel {
        alignas(64) uint8_t codes[exact::kSegment / exact::kGroup][4][64];
        alignas(64) float scales[exact::kSegment / exact::kGroup][exact::kGroup];
    };

    static void decode(const uint8_t* p, int blocks, Panel& panel) {
        for (int block = 0; block < blocks; ++block) {
            const uint8_t* from = p + (block / 4) * kBytes;
            each_half([&](auto half) STRATA_INLINE {
                for (int step = 0; step < 2; ++step) {
                    Isa::Bytes even, odd;
                    Isa::load_nibbles(from + (block % 4) * 128 + step * 64 + half * kLanes * 4, even, odd);
                    Isa::store_bytes(panel.codes[block][step * 2] + half * kLanes * 4, even);
                    Isa::store_bytes(panel.codes[block][step * 2 + 1] + half * kLanes * 4, odd);
                }
                Isa::store(panel.scales[block] + half * kLanes,
                           Isa::load_e4m3(from + 512 + (block % 4) * 16 + half * kLanes));
            });
        }
    }

    // The sums of one segment of R rows.
    template <int R>
    STRATA_INLINE static void add_panel(const Panel& panel, int blocks, const Row* rows, long first, Sums<kHalves>& acc) {
        for (int block = 0; block < blocks; ++block) {
            const long at = first + block;
            Four<Ints> dot[kHalves];
            start<R, kHalves>(rows, at, dot);
            each<4>([&](auto step) STRATA_INLINE {
                each<kHalves>([&](auto q) STRATA_INLINE {
                    const Isa::Bytes weights = Isa::load(panel.codes[block][step] + q * kLanes * 4);
                    each<R>([&](auto r) STRATA_INLINE {
                        Ints& sum = dot[q].template at<r>();
                        sum = Isa::dot_nibbles(sum, weights, rows[r][at].codes + step * 4);
                    });
                });
            });
            each<kHalves>([&](auto q) STRATA_INLINE {
                finish<R>(dot[q], Isa::load_floats(panel.scales[block] + q * kLanes), rows, at, acc.part[q]);
            });
        }
    }

    static void clean(const uint8_t* p, int weights, uint8_t* out) {
        __builtin_memcpy(out, p, kBytes);
        const int blocks = (weights + exact::kGroup - 1) / exact::kGroup;
        __builtin_memset(out + 512 + blocks * exact::kGroup, 0, (4 - blocks) * exact::kGroup);
    }

    // Blobs hold the even weights of eight, then the odd ones.
    static Codes arrange(Codes codes) {
        return __builtin_shuffle(codes, Codes{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
    }
    static int32_t correction(int sum) { return Isa::correct_nibbles(sum); }
    static float unit(float tensor_scale) { return exact::product(tensor_scale, exact::kNvfp4Unit); }
};

struct Q8 {
    static constexpr long kBytes = 1088;
    static constexpr bool kHasPanel = false;  // codes are used as they lie
    using Row = const CodedGroup*;

    template <int R>
    static constexpr int kPartsAtOnce = kParts<R>;

    template <int R, int P>
    STRATA_INLINE static void add(const uint8_t* p, int part, const Row* rows, long superblock, Sums<P>& acc) {
#pragma GCC unroll 4
        for (int block = 0; block < 4; ++block) {
            const long at = superblock * 4 + block;
            const uint8_t* codes = p + block * 256 + part * kLanes * 4;
            Four<Ints> dot[P];
            each<P>([&](auto q) STRATA_INLINE {
                each<R>([&](auto r) STRATA_INLINE {
                    dot[q].template at<r>() = Isa::start_bytes(&rows[r][at].correction);
                });
            });
            each<4>([&](auto step) STRATA_INLINE {
                each<P>([&](auto q) STRATA_INLINE {
                    const Isa::Bytes weights = Isa::load_bytes(codes + step * 64 + q * kLanes * 4);
                    each<R>([&](auto r) STRATA_INLINE {
                        Ints& sum = dot[q].template at<r>();
                        sum = Isa::dot_bytes(sum, weights, rows[r][at].codes + step * 4);
                    });
                });
            });
            each<P>([&](auto q) STRATA_INLINE {
                const Floats scale = Isa::load_half(p + 1024 + (block / 2) * 32 + (part + q) * kLanes * 2);
                each<R>([&](auto r) STRATA_INLINE {
                    const Floats factor = Isa::product(scale, Isa::spread(&rows[r][at].scale));
                    Floats& sum = acc.part[q].template at<r>();
                    sum = Isa::fused(Isa::finish_bytes(dot[q].template at<r>()), factor, sum);
                });
            });
        }
    }

    static void clean(const uint8_t* p, int weights, uint8_t* out) {
        __builtin_memcpy(out, p, kBytes);
        if (weights <= 32) __builtin_memset(out + 1024 + 32, 0, 32);
    }

    static Codes arrange(Codes codes) { return codes; }
    static int32_t correction(int sum) { return Isa::correct_bytes(sum); }
    static float unit(float tensor_scale) { return tensor_scale; }
};

struct Bf16 {
    static constexpr long kBytes = 2048;
    static constexpr bool kHasPanel = false;
    using Row = const float*;

    template <int R>
    static constexpr int kPartsAtOnce = kHalves == 2 ? 2 : 1;  // few instructions a weight: both parts for any R

    template <int R, int P>
    STRATA_INLINE static void add(const uint8_t* p, int part, const Row* rows, long superblock, Sums<P>& acc) {
        for (int pair = 0; pair < exact::kSuperblock / 2; ++pair) {
            Floats low[P], high[P];
            each<P>([&](auto q) STRATA_INLINE {
                Isa::load_bf16_pairs(p + pair * 64 + (part + q) * kLanes * 4, low[q], high[q]);
            });
            each<R>([&](auto r) STRATA_INLINE {
                const float* x = rows[r] + superblock * exact::kSuperblock + pair * 2;
                each<P>([&](auto q) STRATA_INLINE {
                    Floats& sum = acc.part[q].template at<r>();
                    sum = Isa::fused(low[q], Isa::spread(x), sum);
                    sum = Isa::fused(high[q], Isa::spread(x + 1), sum);
                });
            });
        }
    }

    static void clean(const uint8_t* p, int weights, uint8_t* out) {
        __builtin_memset(out, 0, kBytes);
        const int pairs = weights / 2;
        __builtin_memcpy(out, p, pairs * 64);
        if (weights % 2 == 0) return;
        for (int row = 0; row < exact::kGroup; ++row)  // the first weight of a pair whose second is padding
            __builtin_memcpy(out + pairs * 64 + row * 4, p + pairs * 64 + row * 4, 2);
    }

    static float unit(float tensor_scale) { return tensor_scale; }
};
