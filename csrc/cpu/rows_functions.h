// exp, sigmoid, silu and softplus over Lanes: our own polynomials with explicit FMA, because a library's scalar and
// vector versions differ by position. Included inside a level's namespace by rows_kernels.h. Errors are measured
// against float64 in tests/kernels/test_rows_functions.py; the bounds stand there and in decision record 0021.

// e^x. |error| <= 1 ulp where the result is normal; 0 below -104, inf above 88.73; NaN stays NaN; e^0 = 1.
// x = n ln2 + r, |r| <= ln2 / 2; e^r = 1 + r + r^2 q(r), q minimax of degree 5 (error 2e-10 of e^r).
static inline Lanes exponential(Lanes x) {
  const Lanes magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = smaller(broadcast(89.0f), larger(broadcast(-105.0f), x));
  const Lanes shifted = fma(x, broadcast(0x1.715476p+0f), magic);
  const Lanes n = sub(shifted, magic);
  Lanes r = fma(n, broadcast(-0x1.62e430p-1f), x);
  r = fma(n, broadcast(0x1.05c610p-29f), r);
  Lanes q = fma(broadcast(0x1.a125f6p-13f), r, broadcast(0x1.6d444ap-10f));
  q = fma(q, r, broadcast(0x1.1110e0p-7f));
  q = fma(q, r, broadcast(0x1.5554e8p-5f));
  q = fma(q, r, broadcast(0x1.555556p-3f));
  q = fma(q, r, broadcast(0.5f));
  const Lanes p = add(fma(mul(r, r), q, r), broadcast(1.0f));
  return scale_by_power(p, shifted);
}

// 1 / (1 + e^-x). |error| <= 2.5 ulp for x > -87; below it falls to 0 a little early (e^-x overflows at 88.73).
static inline Lanes sigmoid(Lanes x) {
  const Lanes one = broadcast(1.0f);
  return div(one, add(one, exponential(neg(x))));
}

// x / (1 + e^-x), |error| <= 2.5 ulp likewise.
static inline Lanes silu(Lanes x) { return div(x, add(broadcast(1.0f), exponential(neg(x)))); }

// log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x|; log1p(u) = 2 s (1 + s^2 w(s^2)), s = u / (2 + u) <= 1/3, w
// minimax of degree 4 (error 4e-9). |error| <= 3 ulp.
static inline Lanes softplus(Lanes x) {
  const Lanes u = exponential(neg(absolute(x)));
  const Lanes s = div(u, add(broadcast(2.0f), u));
  const Lanes z = mul(s, s);
  Lanes w = fma(broadcast(0.11612164974212646f), z, broadcast(0.1085328757762909f));
  w = fma(w, z, broadcast(0.142961785197258f));
  w = fma(w, z, broadcast(0.19999852776527405f));
  w = fma(w, z, broadcast(0.3333333432674408f));
  const Lanes twice = add(s, s);
  const Lanes log1p = fma(mul(twice, z), w, twice);
  return add(larger(broadcast(0.0f), x), log1p);
}
