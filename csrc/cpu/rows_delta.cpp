// The C interface of the gated delta net and of the causal convolution.
#include <algorithm>

#include "rows_dispatch.h"

namespace strata {
namespace {

struct StateRoom;
struct InputRoom;

int check_taps(int64_t taps, int64_t dilation) {
  if (taps < 1 || taps > kMostTaps || dilation < 1)
    return fail(kBadArgument, "a convolution of %ld taps with dilation %ld: 1 to %ld taps", long(taps), long(dilation),
                long(kMostTaps));
  return kOk;
}

// Channels [first, first + channels) over the pool, in slices of whole 64s.
int convolve(const ConvCall& call, int64_t first, int64_t channels, float* y, int64_t y_stride) {
  const int64_t blocks = (channels + 63) / 64;
  const int64_t grain = at_least_one(kElementsOfSlice / (64 * call.taps * at_least_one(call.last - call.first)));
  return parallel(blocks, grain, [&](long begin, long end) {
    const int64_t from = first + begin * 64, to = first + std::min<int64_t>(end * 64, channels);
    table().causal_conv(call, from, to, y + begin * 64, y_stride);
  });
}

}  // namespace
}  // namespace strata

#pragma GCC visibility push(default)
extern "C" {

// Ops.causal_conv.
int strata_rows_causal_conv(const float* x, const float* tail, const float* weight, int64_t rows, int64_t channels,
                            int64_t taps, int64_t dilation, float* y) {
  using namespace strata;
  const int status = check_taps(taps, dilation);
  if (status != kOk) return status;
  return convolve(ConvCall{x, tail, weight, 0, rows, channels, taps, dilation}, 0, channels, y, channels);
}

// Ops.delta_inputs.
int strata_rows_delta_inputs(const float* qkv, const float* tail, const float* conv, int64_t taps, const float* b,
                             const float* a, const float* log_decay, const float* dt_bias, int64_t rows,
                             int64_t key_heads, int64_t value_heads, int64_t key_width, int64_t value_width,
                             float query_scale, float* q, float* k, float* v, float* beta, float* g) {
  using namespace strata;
  int status = check_taps(taps, 1);
  if (status != kOk) return status;
  const int64_t keys = key_heads * key_width, values = value_heads * value_width;
  ConvCall call{qkv, tail, conv, 0, rows, 2 * keys + values, taps, 1};
  status = convolve(call, 2 * keys, values, v, values);
  if (status != kOk) return status;
  float* mixed = scratch<InputRoom>(2 * std::min(rows, kSlabRows) * keys);
  if (mixed == nullptr) return no_scratch("delta_inputs");
  for (int64_t slab = 0; slab < rows; slab += kSlabRows) {
    call.first = slab;
    call.last = std::min(slab + kSlabRows, rows);
    status = convolve(call, 0, 2 * keys, mixed, 2 * keys);
    if (status != kOk) return status;
    status = over_rows(call.last - slab, 2 * keys, [&](long begin, long end) {
      for (long i = begin; i < end; i++) {
        const int64_t t = slab + i;
        table().unit_length(mixed + 2 * i * keys, query_scale, key_heads, key_width, q + t * keys);
        table().unit_length(mixed + (2 * i + 1) * keys, 1.0f, key_heads, key_width, k + t * keys);
      }
    });
    if (status != kOk) return status;
  }
  return over_rows(rows, 4 * value_heads, [&](long begin, long end) {
    table().delta_gates(b + begin * value_heads, a + begin * value_heads, log_decay, dt_bias, end - begin, value_heads,
                        beta + begin * value_heads, g + begin * value_heads);
  });
}

// Ops.gated_delta: `pending` rows are folded into `state` first, then `rows` run; `write` keeps the state after them.
int strata_rows_gated_delta(const float* pending_k, const float* pending_v, const float* pending_beta,
                            const float* pending_g, int64_t pending, const float* q, const float* k, const float* v,
                            const float* beta, const float* g, int64_t rows, int64_t key_heads, int64_t value_heads,
                            int64_t key_width, int64_t value_width, int write, float* state, float* o) {
  using namespace strata;
  if (key_heads < 1 || value_heads % key_heads != 0)
    return fail(kBadArgument, "%ld value heads on %ld key heads", long(value_heads), long(key_heads));
  float* decay = scratch<InputRoom>((pending + rows) * value_heads);
  if (decay == nullptr) return no_scratch("gated_delta");
  float* decay_now = decay + pending * value_heads;
  {
    FloatingPointMode mode;
    table().function(0, pending_g, pending * value_heads, decay);
    table().function(0, g, rows * value_heads, decay_now);
  }
  const DeltaCall call{{pending_k, pending_v, pending_beta, decay, pending},
                       {k, v, beta, decay_now, rows},
                       q,
                       state,
                       o,
                       key_heads,
                       value_heads,
                       key_width,
                       value_width,
                       write};
  const int64_t columns = table().delta_columns(), blocks = (value_width + columns - 1) / columns;
  const int64_t work = 4 * key_width * columns * at_least_one(pending + rows);
  return parallel(value_heads * blocks, at_least_one(kProductsOfSlice / work), [&](long begin, long end) {
    float* room = scratch<StateRoom>(key_width * columns);
    if (room == nullptr) return no_scratch("gated_delta");
    for (long i = begin; i < end; i++) table().gated_delta(call, i / blocks, i % blocks * columns, room);
    return static_cast<int>(kOk);
  });
}

// Ops.gated_norm for `count` vectors of `width`; `smooth` picks silu over sigmoid.
int strata_rows_gated_norm(const float* o, const float* z, const float* weight, float eps, int smooth, int64_t count,
                           int64_t width, float* y) {
  return strata::over_rows(count, 2 * width, [&](long begin, long end) {
    strata::table().gated_norm(o + begin * width, z + begin * width, weight, eps, smooth, end - begin, width,
                               y + begin * width);
  });
}
}
#pragma GCC visibility pop
