// The C interface of hyper-connections and the n-gram gate.
#include <algorithm>

#include "rows_dispatch.h"

extern "C" {

#pragma GCC visibility push(default)
int strata_rows_linear(const float* x, int64_t rows, int format, const void* data, const uint16_t* scales,
                       int64_t outputs, int64_t columns, int64_t stride, float* y);
#pragma GCC visibility pop

// A dense matrix as the binding lays it out (NativeMatrix in kernels/cpu/row_calls.py).
struct StrataMatrix {
  const void* data;
  const uint16_t* scales;
  int64_t rows, columns, stride;
  int64_t format;
};
}

namespace strata {
namespace {

struct MixScratch;

struct MixCall {
  int64_t streams, columns;
  const float* norm;
  float eps;
  const StrataMatrix* down;
  const StrataMatrix* up;
  const StrataMatrix* inject;
};

int multiply(const float* x, int64_t rows, const StrataMatrix& w, float* y) {
  return strata_rows_linear(x, rows, static_cast<int>(w.format), w.data, w.scales, w.rows, w.columns, w.stride, y);
}

// At most kSlabRows rows.
int mix(const MixCall& call, const float* x, int64_t rows, float* u, float* c) {
  const int64_t streams = call.streams, columns = call.columns, row = streams * columns, low = call.down->rows;
  float* n = scratch<MixScratch>(rows * (2 * row + low));
  if (n == nullptr) return no_scratch("hyper_mix");
  float* gates = n + rows * row;
  float* hidden = gates + rows * row;
  const float divisor = static_cast<float>(streams);
  int status = over_rows(rows, row, [&](long begin, long end) {
    table().stream_norm(x + begin * row, call.norm, call.eps, end - begin, streams, columns, n + begin * row);
  });
  if (status != kOk) return status;
  status = multiply(n, rows, *call.down, hidden);
  if (status != kOk) return status;
  status = parallel(rows * low, kElementsOfSlice, [&](long begin, long end) {
    table().silu_divided(hidden + begin, divisor, end - begin, hidden + begin);
  });
  if (status != kOk) return status;
  status = multiply(hidden, rows, *call.up, gates);
  if (status != kOk) return status;
  status = over_rows(rows, 2 * row, [&](long begin, long end) {
    table().stream_mean(gates + begin * row, n + begin * row, end - begin, streams, columns, u + begin * columns);
  });
  if (status != kOk || call.inject == nullptr) return status;
  status = multiply(n, rows, *call.inject, c);
  if (status != kOk) return status;
  return parallel(rows * streams, kElementsOfSlice, [&](long begin, long end) {
    table().twice_sigmoid(c + begin, divisor, end - begin, c + begin);
  });
}

}  // namespace
}  // namespace strata

#pragma GCC visibility push(default)
extern "C" {

// Ops.hyper_mix: u (T x H) and, with `inject`, c (T x S).
int strata_rows_hyper_mix(const float* x, int64_t rows, int64_t streams, int64_t columns, const float* norm, float eps,
                          const StrataMatrix* down, const StrataMatrix* up, const StrataMatrix* inject, float* u,
                          float* c) {
  using namespace strata;
  const MixCall call{streams, columns, norm, eps, down, up, inject};
  for (int64_t t = 0; t < rows; t += kSlabRows) {
    const int64_t count = std::min(kSlabRows, rows - t);
    const int status = mix(call, x + t * streams * columns, count, u + t * columns, c == nullptr ? c : c + t * streams);
    if (status != kOk) return status;
  }
  return kOk;
}

// Ops.hyper_add.
int strata_rows_hyper_add(const float* x, const float* c, const float* y, int64_t rows, int64_t streams,
                          int64_t columns, float* out) {
  const int64_t row = streams * columns;
  return strata::over_rows(rows, row, [&](long begin, long end) {
    strata::table().stream_add(x + begin * row, c + begin * streams, y + begin * columns, end - begin, streams, columns,
                               out + begin * row);
  });
}

// Ops.ngram_gate.
int strata_rows_ngram_gate(const float* key, const float* value, const float* x, const float* norm_key,
                           const float* norm_query, const float* norm_conv, float eps, int64_t rows, int64_t streams,
                           int64_t columns, float* gated, float* normed) {
  const strata::NgramCall call{key, value, x, norm_key, norm_query, norm_conv, eps, rows, streams, columns, gated, normed};
  return strata::over_rows(rows, 4 * streams * columns,
                           [&](long begin, long end) { strata::table().ngram_gate(call, begin, end); });
}
}
#pragma GCC visibility pop
