// Portable vectors: one source, three widths.
//
// Every kernel file is compiled once per instruction set with SINKHORN_ISA naming the namespace
// (baseline, avx2, avx512). All code lives inside that namespace and nothing here calls an inline
// function of the standard library: two copies of such a function, compiled for different sets,
// would be merged by the linker, and the wrong one might run on an old processor.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef SINKHORN_ISA
#error "compile kernel files with SINKHORN_ISA set to baseline, avx2 or avx512"
#endif

#define SINKHORN_INLINE inline __attribute__((always_inline))

namespace sinkhorn::cpu::SINKHORN_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;

// The integer vector that comparisons of Vec<T> give.
template <class T>
struct MaskOf;
template <>
struct MaskOf<float> {
  typedef int32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct MaskOf<double> {
  typedef int64_t type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using MaskVec = typename MaskOf<T>::type;

template <class T>
constexpr T kInf = static_cast<T>(__builtin_inf());

template <class T>
SINKHORN_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
SINKHORN_INLINE void store(T* p, Vec<T> v) {
  memcpy(p, &v, sizeof(v));
}
template <class T>
SINKHORN_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}
// The first `count` lanes from memory, the others `fill`.
template <class T>
SINKHORN_INLINE Vec<T> load_some(const T* p, int count, T fill) {
  Vec<T> v = splat(fill);
  for (int l = 0; l < count; ++l) v[l] = p[l];
  return v;
}
template <class T>
SINKHORN_INLINE void store_some(T* p, Vec<T> v, int count) {
  for (int l = 0; l < count; ++l) p[l] = v[l];
}

template <class T>
SINKHORN_INLINE T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
SINKHORN_INLINE T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
SINKHORN_INLINE Vec<T> vmax(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// The vector turned by half of its first 2 * kHalf lanes; what the other lanes get does not matter.
template <int kHalf, class V>
SINKHORN_INLINE V swap_halves(V v) {
  constexpr int kCount = sizeof(V) / sizeof(v[0]);
  if constexpr (kCount == 16) {
    constexpr int h = kHalf;
    return __builtin_shufflevector(v, v, h, (1 + h) % 16, (2 + h) % 16, (3 + h) % 16, (4 + h) % 16,
                                   (5 + h) % 16, (6 + h) % 16, (7 + h) % 16, (8 + h) % 16,
                                   (9 + h) % 16, (10 + h) % 16, (11 + h) % 16, (12 + h) % 16,
                                   (13 + h) % 16, (14 + h) % 16, (15 + h) % 16);
  } else if constexpr (kCount == 8) {
    constexpr int h = kHalf;
    return __builtin_shufflevector(v, v, h, (1 + h) % 8, (2 + h) % 8, (3 + h) % 8, (4 + h) % 8,
                                   (5 + h) % 8, (6 + h) % 8, (7 + h) % 8);
  } else if constexpr (kCount == 4) {
    constexpr int h = kHalf;
    return __builtin_shufflevector(v, v, h, (1 + h) % 4, (2 + h) % 4, (3 + h) % 4);
  } else {
    return __builtin_shufflevector(v, v, 1, 0);
  }
}

// Reductions in a fixed order: halves are joined until one lane is left.
template <class T, int kHalf = kLanes<T> / 2>
SINKHORN_INLINE T sum_lanes(Vec<T> v) {
  if constexpr (kHalf == 0) {
    return v[0];
  } else {
    return sum_lanes<T, kHalf / 2>(v + swap_halves<kHalf>(v));
  }
}
template <class T, int kHalf = kLanes<T> / 2>
SINKHORN_INLINE T max_lanes(Vec<T> v) {
  if constexpr (kHalf == 0) {
    return v[0];
  } else {
    return max_lanes<T, kHalf / 2>(vmax<T>(v, swap_halves<kHalf>(v)));
  }
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr float kRoundingShift =
    12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer

// x = n ln2 + r with |r| <= ln2 / 2: returns e^r by a polynomial of degree 6, within 1 ulp with
// FMA, and n + kRoundingShift, whose low bits are n.
SINKHORN_INLINE Vec<float> exp_fraction(Vec<float> x, Vec<float>* shifted) {
  using V = Vec<float>;
  *shifted = x * 1.44269504088896341f + kRoundingShift;
  const V n = *shifted - kRoundingShift;
  V r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + (r + 1.0f);
}

// exp for float. 2^n comes in two factors so that subnormal results and overflow to inf come out
// right. NaN stays NaN.
SINKHORN_INLINE Vec<float> vexp(Vec<float> x) {
  using V = Vec<float>;
  typedef MaskVec<float> I;
  const V high = splat(104.0f), low = splat(-110.0f);
  x = x > high ? high : x;
  x = x < low ? low : x;
  V shifted;
  const V p = exp_fraction(x, &shifted);
  const I exponent = __builtin_convertvector(shifted - kRoundingShift, I);
  const I half = exponent >> 1;
  const I first = (half + 127) << 23, second = (exponent - half + 127) << 23;
  V f, s;
  memcpy(&f, &first, sizeof(f));
  memcpy(&s, &second, sizeof(s));
  return p * f * s;
}
// exp for x <= 0 where nothing below 2^-126 matters: softmax weights. n is added to the exponent.
SINKHORN_INLINE Vec<float> vexp_weight(Vec<float> x) {
  using V = Vec<float>;
  typedef MaskVec<float> I;
  const V low = splat(-87.0f), zero = {};
  V shifted;
  const V p = exp_fraction(x, &shifted);
  I bits, power;
  memcpy(&bits, &p, sizeof(bits));
  memcpy(&power, &shifted, sizeof(power));
  bits += power << 23;
  V result;
  memcpy(&result, &bits, sizeof(result));
  return x < low ? zero : (x == x ? result : x);
}
// float64 exists for checks: exactness before speed.
SINKHORN_INLINE Vec<double> vexp(Vec<double> x) {
  for (int l = 0; l < kLanes<double>; ++l) x[l] = ::exp(x[l]);
  return x;
}

SINKHORN_INLINE Vec<double> vexp_weight(Vec<double> x) { return vexp(x); }

// log1p(y) for y >= 0, float: log of u = 1 + y by mantissa and exponent, plus the rounding error
// of u put back as (y - (u - 1)) / u.
SINKHORN_INLINE Vec<float> vlog1p(Vec<float> y) {
  using V = Vec<float>;
  typedef MaskVec<float> I;
  const V u = 1.0f + y;
  const V lost = (y - (u - 1.0f)) / u;
  I bits;
  memcpy(&bits, &u, sizeof(bits));
  // Choose the exponent so that the mantissa lies in [sqrt(1/2), sqrt(2)).
  const I shifted = bits - 0x3f3504f3;
  const I exponent = shifted >> 23;
  const I mantissa_bits = bits - (exponent << 23);
  V m;
  memcpy(&m, &mantissa_bits, sizeof(m));
  const V e = __builtin_convertvector(exponent, V);
  const V f = m - 1.0f;
  const V z = f * f;
  V p = splat(7.0376836292e-2f);
  p = p * f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  V result = f * z * p;
  result = result + e * -2.12194440e-4f;
  result = result - 0.5f * z;
  result = f + result;
  result = result + e * 0.693359375f;
  return result + lost;
}
SINKHORN_INLINE Vec<double> vlog1p(Vec<double> y) {
  for (int l = 0; l < kLanes<double>; ++l) y[l] = ::log1p(y[l]);
  return y;
}

SINKHORN_INLINE float exp_of(float x) { return ::expf(x); }
SINKHORN_INLINE double exp_of(double x) { return ::exp(x); }
SINKHORN_INLINE float log_of(float x) { return ::logf(x); }
SINKHORN_INLINE double log_of(double x) { return ::log(x); }

// sum += x, carrying along what rounding loses (Kahan); V is a number or a vector of them.
template <class V>
SINKHORN_INLINE void add_compensated(V x, V& sum, V& lost) {
  const V y = x - lost, next = sum + y;
  lost = (next - sum) - y;
  sum = next;
}
template <class T>
void add_compensated(const T* x, int64_t count, T* sum, T* lost) {
  int64_t c = 0;
  for (; c + kLanes<T> <= count; c += kLanes<T>) {
    Vec<T> s = load(sum + c), l = load(lost + c);
    add_compensated(load(x + c), s, l);
    store(sum + c, s);
    store(lost + c, l);
  }
  for (; c < count; ++c) add_compensated(x[c], sum[c], lost[c]);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
