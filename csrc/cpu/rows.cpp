// The plain C interface of the row kernels that every family uses: products, norm, rope, router, gates, argmax.
// Addresses are of contiguous FP32 data unless a format says otherwise; outputs belong to the caller.
#include <algorithm>
#include <atomic>

#include "rows_dispatch.h"

namespace strata {
namespace {

struct PackedRows;

// Outputs of one task of a product with many rows. Wide chunks read x seldom, narrow ones keep all threads busy to the end:
// about eight tasks a thread.
int64_t chunk_of(int64_t outputs_of_all_blocks) {
  const int64_t wanted = outputs_of_all_blocks / (8 * pool_threads()) / 8 * 8;
  return std::min(std::max<int64_t>(wanted, 32), kMostChunk);
}

// A product with many rows: x is cut into panels once for all outputs.
int many_rows(const float* x, int64_t rows, const WeightRows& w, int64_t outputs, float* y) {
  const int64_t packed_floats = packed_block(w.columns);
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t chunk = chunk_of(outputs * blocks), chunks = (outputs + chunk - 1) / chunk;
  float* packed = scratch<PackedRows>(blocks * packed_floats);
  if (packed == nullptr) return no_scratch("linear");
  const int status = parallel(blocks, 1, [&](long begin, long end) {
    table().pack_rows(x, rows, w.columns, begin, end, packed);
  });
  if (status != kOk) return status;
  const int64_t grain = at_least_one(kProductsOfSlice / (chunk * w.columns * std::min(rows, kBlockRows)));
  return parallel(chunks * blocks, grain, [&](long begin, long end) {
    for (long task = begin; task < end; task++) {
      const int64_t block = task % blocks, o = task / blocks * chunk, t = block * kBlockRows;
      table().linear_packed(packed + block * packed_floats, std::min(rows - t, kBlockRows), w, o,
                            std::min(o + chunk, outputs), y + t * outputs, outputs);
    }
  });
}

struct CodesOfRows;
struct UnitsOfRows;

// A Q8_0 product: rows are coded once for all outputs, at most 2 * kSlabRows of them.
int linear_q8(const float* x, int64_t rows, const WeightRows& w, int64_t outputs, float* y) {
  const CodedShape shape = coded_shape(w.columns);
  int16_t* codes = scratch<CodesOfRows, int16_t>(rows * shape.codes);
  float* units = scratch<UnitsOfRows>(rows * shape.units);
  if (codes == nullptr || units == nullptr) return no_scratch("linear");
  const int status = over_rows(rows, w.columns, [&](long begin, long end) {
    table().encode_rows(x + begin * w.columns, end - begin, w.columns, shape, codes + begin * shape.codes,
                        units + begin * shape.units);
  });
  if (status != kOk) return status;
  const CodedRows coded{codes, units, shape};
  if (rows < kPackRows) {
    // Slices of 32 outputs and more: shorter runs of memory are slower (rows_q8.h).
    const int64_t grain = std::max<int64_t>(4, kProductsOfSlice / (4 * w.columns * (rows + 1)));
    return parallel((outputs + 7) / 8, grain, [&](long begin, long end) {
      table().linear_q8(coded, rows, w, begin * 8, std::min<int64_t>(end * 8, outputs), y, outputs);
    });
  }
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t chunk = chunk_of(outputs * blocks), chunks = (outputs + chunk - 1) / chunk;
  const int64_t grain = at_least_one(kProductsOfSlice / (chunk * w.columns * std::min(rows, kBlockRows)));
  return parallel(chunks * blocks, grain, [&](long begin, long end) {
    for (long task = begin; task < end; task++) {
      const int64_t t = task % blocks * kBlockRows, o = task / blocks * chunk;
      const CodedRows here{codes + t * shape.codes, units + t * shape.units, shape};
      table().linear_q8(here, std::min(rows - t, kBlockRows), w, o, std::min(o + chunk, outputs), y + t * outputs,
                        outputs);
    }
  });
}

}  // namespace
}  // namespace strata

using strata::WeightRows;

#pragma GCC visibility push(default)
extern "C" {

int strata_rows_linear(const float* x, int64_t rows, int format, const void* data, const uint16_t* scales,
                       int64_t outputs, int64_t columns, int64_t stride, float* y) {
  using namespace strata;
  const WeightRows w{format, data, scales, columns, stride, stride / 32, nullptr};
  if (format == kQ8) {
    for (int64_t t = 0; t < rows; t += 2 * kSlabRows) {
      const int64_t count = std::min(2 * kSlabRows, rows - t);
      const int status = linear_q8(x + t * columns, count, w, outputs, y + t * outputs);
      if (status != kOk) return status;
    }
    return kOk;
  }
  if (rows < kPackRows) {
    const int64_t grain = at_least_one(kProductsOfSlice / (8 * columns * (rows + 1)));
    return parallel((outputs + 7) / 8, grain, [&](long begin, long end) {
      table().linear(x, columns, rows, w, begin * 8, std::min<int64_t>(end * 8, outputs), y, outputs);
    });
  }
  // Slabs bound the packed copy; more than 512 rows would save no weights worth reading.
  for (int64_t t = 0; t < rows; t += 2 * kSlabRows) {
    const int status = many_rows(x + t * columns, std::min(2 * kSlabRows, rows - t), w, outputs, y + t * outputs);
    if (status != kOk) return status;
  }
  return kOk;
}

int strata_rows_embedding(const int64_t* ids, int64_t rows, int format, const void* data, const uint16_t* scales,
                          int64_t vocabulary, int64_t columns, int64_t stride, float* y) {
  for (int64_t t = 0; t < rows; t++)
    if (ids[t] < 0 || ids[t] >= vocabulary)
      return strata::fail(strata::kBadArgument, "token id %ld, the table has %ld rows", long(ids[t]), long(vocabulary));
  const WeightRows w{format, data, scales, columns, stride, stride / 32, nullptr};
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().embedding(ids + begin, end - begin, w, y + begin * columns);
  });
}

int strata_rows_rms_norm(const float* x, const float* weight, float eps, int plus_one, int64_t rows, int64_t columns,
                         float* y) {
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().rms_norm(x + begin * columns, weight, eps, plus_one, end - begin, columns, y + begin * columns);
  });
}

int strata_rows_rope(const float* x, const float* cosine, const float* sine, int64_t rows, int64_t heads,
                     int64_t width, int64_t half, float* y) {
  const int64_t row = heads * width;
  return strata::over_rows(rows, row, [&](long begin, long end) {
    strata::table().rope(x + begin * row, cosine + begin * half, sine + begin * half, end - begin, heads, width, half,
                         y + begin * row);
  });
}

int strata_rows_router(const float* logits, int64_t rows, int64_t experts, int64_t top_k, int renormalise,
                       int32_t* ids, float* weights) {
  return strata::over_rows(rows, experts * 8, [&](long begin, long end) {
    strata::table().router(logits + begin * experts, end - begin, experts, top_k, renormalise, ids + begin * top_k,
                           weights + begin * top_k);
  });
}

int strata_rows_silu_mul(const float* gate, const float* up, int64_t count, float* y) {
  return strata::parallel(count, strata::kElementsOfSlice, [&](long begin, long end) {
    strata::table().silu_mul(gate + begin, up + begin, end - begin, y + begin);
  });
}

int strata_rows_sigmoid_mul(const float* gate, const float* x, int64_t count, float* y) {
  return strata::parallel(count, strata::kElementsOfSlice, [&](long begin, long end) {
    strata::table().sigmoid_mul(gate + begin, x + begin, end - begin, y + begin);
  });
}

int strata_rows_sigmoid_scale(const float* gate, const float* x, int64_t rows, int64_t columns, float* y) {
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().sigmoid_scale(gate + begin, x + begin * columns, end - begin, columns, y + begin * columns);
  });
}

int strata_rows_add(const float* x, const float* y, int64_t count, float* z) {
  return strata::parallel(count, 4 * strata::kElementsOfSlice, [&](long begin, long end) {
    strata::table().add(x + begin, y + begin, end - begin, z + begin);
  });
}

int strata_rows_argmax(const float* logits, int64_t rows, int64_t columns, int64_t* ids) {
  return strata::over_rows(rows, columns, [&](long begin, long end) {
    strata::table().argmax(logits + begin * columns, end - begin, columns, ids + begin);
  });
}

// exp, sigmoid, silu, softplus as the kernels compute them: `which` 0 to 3.
int strata_rows_function(int which, const float* x, int64_t count, float* y) {
  return strata::parallel(count, strata::kElementsOfSlice,
                          [&](long begin, long end) { strata::table().function(which, x + begin, end - begin, y + begin); });
}

// `slices` slices of `rounds` rounds of FMA over the pool; returns the multiply-adds in `done`. For benchmarks.
int strata_rows_fma_rounds(int64_t slices, int64_t rounds, int64_t* done) {
  std::atomic<int64_t> total{0};
  const int status = strata::parallel(slices, 1, [&](long begin, long end) {
    float y[3] = {0.999f, 0.001f, 0.0f};
    for (long i = begin; i < end; i++) total += strata::table().fma_rounds(rounds, y);
  });
  *done = total.load();
  return status;
}
}
#pragma GCC visibility pop
