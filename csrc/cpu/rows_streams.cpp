// The C interface of hyper-connections and the n-gram gate.
#include "rows_dispatch.h"

namespace strata {
namespace {

struct MixScratch;

}  // namespace
}  // namespace strata

#pragma GCC visibility push(default)
extern "C" {

int strata_rows_linear(const float* x, int64_t rows, int format, const void* data, const uint16_t* scales,
                       int64_t outputs, int64_t columns, int64_t stride, float* y);

// A dense matrix as the binding lays it out (kernels/cpu/ops.py).
struct StrataMatrix {
  const void* data;
  const uint16_t* scales;
  int64_t rows, columns, stride;
  int64_t format;
};

// Ops.hyper_mix: u (T x H) and, with `inject`, c (T x S).
int strata_rows_hyper_mix(const float* x, int64_t rows, int64_t streams, int64_t columns, const float* norm, float eps,
                          const StrataMatrix* down, const StrataMatrix* up, const StrataMatrix* inject, float* u,
                          float* c) {
  using namespace strata;
  const int64_t row = streams * columns, low = down->rows;
  float* n = scratch<MixScratch>(static_cast<std::size_t>(rows * (2 * row + low)));
  float* mix = n + rows * row;
  float* hidden = mix + rows * row;
  const float divisor = static_cast<float>(streams);
  int status = over_rows(rows, row, [&](long begin, long end) {
    table().stream_norm(x + begin * row, norm, eps, end - begin, streams, columns, n + begin * row);
  });
  if (status != kOk) return status;
  status = strata_rows_linear(n, rows, int(down->format), down->data, down->scales, low, row, down->stride, hidden);
  if (status != kOk) return status;
  status = parallel(rows * low, kElementsOfSlice, [&](long begin, long end) {
    table().silu_divided(hidden + begin, divisor, end - begin, hidden + begin);
  });
  if (status != kOk) return status;
  status = strata_rows_linear(hidden, rows, int(up->format), up->data, up->scales, row, low, up->stride, mix);
  if (status != kOk) return status;
  status = over_rows(rows, 2 * row, [&](long begin, long end) {
    table().stream_mean(mix + begin * row, n + begin * row, end - begin, streams, columns, u + begin * columns);
  });
  if (status != kOk || inject == nullptr) return status;
  status = strata_rows_linear(n, rows, int(inject->format), inject->data, inject->scales, streams, row, inject->stride, c);
  if (status != kOk) return status;
  return parallel(rows * streams, kElementsOfSlice, [&](long begin, long end) {
    table().twice_sigmoid(c + begin, divisor, end - begin, c + begin);
  });
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
