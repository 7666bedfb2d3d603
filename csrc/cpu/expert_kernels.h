// The expert kernels, written once over a small set of vector operations. A level's file defines `Isa` inside an
// anonymous namespace of its own and includes this text there, so that no function compiled for one instruction set
// can be linked into another. For the same reason nothing here uses templates of the standard library.
//
// One lane is one output row; the 16 rows of a group are kHalves vectors. A lane sums in the defined order, so the
// number of lanes, of rows at once and of threads changes nothing.

constexpr int kLanes = Isa::kLanes;
constexpr int kHalves = exact::kGroup / kLanes;
// Rows of activations that one reading of the weights serves: as many as leave accumulators in registers.
constexpr int kRowsAtOnce = 4;

using Floats = Isa::Floats;

struct Nvfp4 {
    static constexpr long kBytes = 576;
    using Row = CodedRow;

    template <int R>
    static void add(const uint8_t* p, int half, const Row* rows, long superblock, Floats* acc) {
        for (int block = 0; block < 4; ++block) {
            const long at = superblock * 4 + block;
            Isa::Ints dot[R];
            for (int r = 0; r < R; ++r) dot[r] = Isa::start_nibbles(rows[r].corrections + at);
            for (int step = 0; step < 2; ++step) {
                Isa::Bytes even, odd;
                Isa::load_nibbles(p + block * 128 + step * 64 + half * kLanes * 4, even, odd);
                for (int r = 0; r < R; ++r) {
                    const int8_t* codes = rows[r].codes + at * 16 + step * 8;
                    dot[r] = Isa::dot_nibbles(dot[r], even, codes);
                    dot[r] = Isa::dot_nibbles(dot[r], odd, codes + 4);
                }
            }
            const Floats scale = Isa::load_e4m3(p + 512 + block * 16 + half * kLanes);
            for (int r = 0; r < R; ++r)
                acc[r] = Isa::fused(Isa::finish_nibbles(dot[r]), Isa::product(scale, Isa::spread(rows[r].scales + at)),
                                    acc[r]);
        }
    }

    // Blobs hold the even weights of eight, then the odd ones.
    static int place(int i) { return (i & 8) | ((i & 1) << 2) | ((i & 7) >> 1); }
    static int32_t correction(int sum) { return Isa::correct_nibbles(sum); }
    static float unit(float tensor_scale) { return exact::product(tensor_scale, exact::kNvfp4Unit); }
};

struct Q8 {
    static constexpr long kBytes = 1088;
    using Row = CodedRow;

    template <int R>
    static void add(const uint8_t* p, int half, const Row* rows, long superblock, Floats* acc) {
        for (int block = 0; block < 4; ++block) {
            const long at = superblock * 4 + block;
            Isa::Ints dot[R];
            for (int r = 0; r < R; ++r) dot[r] = Isa::start_bytes(rows[r].corrections + at);
            for (int step = 0; step < 4; ++step) {
                const Isa::Bytes weights = Isa::load_bytes(p + block * 256 + step * 64 + half * kLanes * 4);
                for (int r = 0; r < R; ++r)
                    dot[r] = Isa::dot_bytes(dot[r], weights, rows[r].codes + at * 16 + step * 4);
            }
            const Floats scale = Isa::load_half(p + 1024 + (block / 2) * 32 + half * kLanes * 2);
            for (int r = 0; r < R; ++r)
                acc[r] = Isa::fused(Isa::finish_bytes(dot[r]), Isa::product(scale, Isa::spread(rows[r].scales + at)),
                                    acc[r]);
        }
    }

    static int place(int i) { return i; }
    static int32_t correction(int sum) { return Isa::correct_bytes(sum); }
    static float unit(float tensor_scale) { return tensor_scale; }
};

struct PlainRow {
    const float* values;
    PlainRow() = default;
    PlainRow(const void* row, long) : values(static_cast<const float*>(row)) {}
};

struct Bf16 {
    static constexpr long kBytes = 2048;
    using Row = PlainRow;

    template <int R>
    static void add(const uint8_t* p, int half, const Row* rows, long superblock, Floats* acc) {
        for (int pair = 0; pair < exact::kSuperblock / 2; ++pair) {
            Floats low, high;
            Isa::load_bf16_pairs(p + pair * 64 + half * kLanes * 4, low, high);
            for (int r = 0; r < R; ++r) {
                const float* x = rows[r].values + superblock * exact::kSuperblock + pair * 2;
                acc[r] = Isa::fused(low, Isa::spread(x), acc[r]);
                acc[r] = Isa::fused(high, Isa::spread(x + 1), acc[r]);
            }
        }
    }

    static float unit(float tensor_scale) { return tensor_scale; }
};

// Sixteen FP32 results of one group for each of R rows: the segments' sums in order, times the tensor scale.
template <class Format, int R>
void multiply(const uint8_t* group, long superblocks, const typename Format::Row* rows, float unit, float (*out)[16]) {
    Floats total[kHalves][R];
    for (int half = 0; half < kHalves; ++half)
        for (int r = 0; r < R; ++r) total[half][r] = Isa::zero();
    for (long first = 0; first < superblocks; first += exact::kSegment / exact::kSuperblock) {
        const long last = first + exact::kSegment / exact::kSuperblock;
        const long end = last < superblocks ? last : superblocks;
        for (int half = 0; half < kHalves; ++half) {
            Floats acc[R];
            for (int r = 0; r < R; ++r) acc[r] = Isa::zero();
            for (long s = first; s < end; ++s) Format::template add<R>(group + s * Format::kBytes, half, rows, s, acc);
            for (int r = 0; r < R; ++r) total[half][r] = Isa::sum(total[half][r], acc[r]);
        }
    }
    for (int half = 0; half < kHalves; ++half)
        for (int r = 0; r < R; ++r)
            Isa::store(out[r] + half * kLanes, Isa::product(total[half][r], Isa::spread(&unit)));
}

template <class Format>
void multiply_rows(const uint8_t* group, long superblocks, const typename Format::Row* rows, int count, float unit,
                   float (*out)[16]) {
    switch (count) {
        case 1: return multiply<Format, 1>(group, superblocks, rows, unit, out);
        case 2: return multiply<Format, 2>(group, superblocks, rows, unit, out);
        case 3: return multiply<Format, 3>(group, superblocks, rows, unit, out);
        default: return multiply<Format, 4>(group, superblocks, rows, unit, out);
    }
}

// Quantises group `at` of a prepared row from 16 values. Returns whether all are finite.
template <class Format>
bool prepare_group(const float* x, long at, const CodedRow& row) {
    unsigned largest = 0;
    for (int i = 0; i < exact::kGroup; ++i) {
        const unsigned size = exact::magnitude(x[i]);
        largest = size > largest ? size : largest;
    }
    const exact::GroupScale group = exact::group_scale(largest);
    int codes[exact::kGroup];
    for (int i = 0; i < exact::kGroup; ++i) codes[i] = exact::nearest(exact::product(x[i], group.inverse));
    auto* out = const_cast<int8_t*>(row.codes) + at * exact::kGroup;
    int total = 0;
    for (int i = 0; i < exact::kGroup; ++i) {
        const int code = group.scale != 0.0f ? codes[i] : 0;  // NaN times 0 is no integer
        out[Format::place(i)] = static_cast<int8_t>(code);
        total += code;
    }
    const_cast<float*>(row.scales)[at] = group.scale;
    const_cast<int32_t*>(row.corrections)[at] = Format::correction(total);
    return group.finite;
}

bool prepare_group_of(Nvfp4*, const float* x, long at, const CodedRow& row) { return prepare_group<Nvfp4>(x, at, row); }
bool prepare_group_of(Q8*, const float* x, long at, const CodedRow& row) { return prepare_group<Q8>(x, at, row); }

bool prepare_group_of(Bf16*, const float* x, long at, const PlainRow& row) {
    float* out = const_cast<float*>(row.values) + at * exact::kGroup;
    unsigned largest = 0;
    for (int i = 0; i < exact::kGroup; ++i) {
        const unsigned size = exact::magnitude(x[i]);
        largest = size > largest ? size : largest;
        out[i] = x[i];
    }
    return largest < exact::kInfinity;
}

template <class Format>
int prepare(const float* x, long width, long superblocks, void* memory) {
    const typename Format::Row row(memory, superblocks);
    bool finite = true;
    const long groups = superblocks * exact::kSuperblock / exact::kGroup;
    const long whole = width / exact::kGroup;
    for (long at = 0; at < whole; ++at)
        finite &= prepare_group_of(static_cast<Format*>(nullptr), x + at * exact::kGroup, at, row);
    for (long at = whole; at < groups; ++at) {
        float rest[exact::kGroup] = {};
        for (long i = at * exact::kGroup; i < width; ++i) rest[i - at * exact::kGroup] = x[i];
        finite &= prepare_group_of(static_cast<Format*>(nullptr), rest, at, row);
    }
    return finite ? 0 : 1;
}

void raise_flag(uint8_t* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }

template <class Format>
void gate_up(const ExpertShape& shape, const uint8_t* blob, float gate_scale, float up_scale, long begin, long end,
             const void* const* x, void* const* h, long count, uint8_t* const* flags) {
    const long superblocks = shape.hidden_superblocks(), inner = shape.inner_superblocks();
    const float gate_unit = Format::unit(gate_scale), up_unit = Format::unit(up_scale);
    for (long group = begin; group < end; ++group) {
        const uint8_t* gate = blob + group * 2 * shape.wide_bytes();
        for (long first = 0; first < count; first += kRowsAtOnce) {
            const int now = static_cast<int>(count - first < kRowsAtOnce ? count - first : kRowsAtOnce);
            typename Format::Row rows[kRowsAtOnce];
            for (int r = 0; r < now; ++r) rows[r] = typename Format::Row(x[first + r], superblocks);
            alignas(64) float gates[kRowsAtOnce][16], ups[kRowsAtOnce][16];
            multiply_rows<Format>(gate, superblocks, rows, now, gate_unit, gates);
            multiply_rows<Format>(gate + shape.wide_bytes(), superblocks, rows, now, up_unit, ups);
            for (int r = 0; r < now; ++r) {
                alignas(64) float inside[16];
                for (int i = 0; i < 16; ++i) inside[i] = exact::product(exact::silu(gates[r][i]), ups[r][i]);
                const typename Format::Row row(h[first + r], inner);
                if (!prepare_group_of(static_cast<Format*>(nullptr), inside, group, row)) raise_flag(flags[first + r]);
            }
        }
    }
    if (end < shape.inner_groups()) return;
    // The last groups of a row that is no multiple of 64 wide.
    const float zeros[exact::kGroup] = {};
    for (long at = end; at < inner * exact::kSuperblock / exact::kGroup; ++at)
        for (long r = 0; r < count; ++r)
            prepare_group_of(static_cast<Format*>(nullptr), zeros, at, typename Format::Row(h[r], inner));
}

template <class Format>
void down(const ExpertShape& shape, const uint8_t* blob, float scale, long begin, long end, const void* const* h,
          float* const* y, long count, uint8_t* const* flags) {
    const long inner = shape.inner_superblocks();
    const float unit = Format::unit(scale);
    for (long group = begin; group < end; ++group) {
        const uint8_t* weights = blob + shape.down_offset() + group * shape.narrow_bytes();
        const long left = shape.hidden - group * exact::kGroup;
        const int width = static_cast<int>(left < exact::kGroup ? left : exact::kGroup);
        for (long first = 0; first < count; first += kRowsAtOnce) {
            const int now = static_cast<int>(count - first < kRowsAtOnce ? count - first : kRowsAtOnce);
            typename Format::Row rows[kRowsAtOnce];
            for (int r = 0; r < now; ++r) rows[r] = typename Format::Row(h[first + r], inner);
            alignas(64) float results[kRowsAtOnce][16];
            multiply_rows<Format>(weights, inner, rows, now, unit, results);
            for (int r = 0; r < now; ++r) {
                unsigned largest = 0;
                float kept[16];
                for (int i = 0; i < 16; ++i) {
                    const unsigned size = exact::magnitude(results[r][i]);
                    largest = size > largest ? size : largest;
                    kept[i] = size < exact::kInfinity ? results[r][i] : 0.0f;
                }
                if (largest >= exact::kInfinity) raise_flag(flags[first + r]);
                __builtin_memcpy(y[first + r] + group * exact::kGroup, kept, sizeof(float) * width);
            }
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

const ExpertKernels* table(int format) {
    static const ExpertKernels tables[kExpertFormats] = {
        {prepare<Nvfp4>, gate_up<Nvfp4>, down<Nvfp4>, combine},
        {prepare<Q8>, gate_up<Q8>, down<Q8>, combine},
        {prepare<Bf16>, gate_up<Bf16>, down<Bf16>, combine},
    };
    return format >= 0 && format < kExpertFormats ? &tables[format] : nullptr;
}
