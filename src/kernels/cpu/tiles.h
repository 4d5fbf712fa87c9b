// Between tensors of any type and stride and zero-padded tiles of the compute type.
#pragma once

#include "kernels/common/params.h"
#include "kernels/cpu/simd.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace sinkhorn::cpu::SINKHORN_ISA {

SINKHORN_INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}
SINKHORN_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

SINKHORN_INLINE float from_bfloat16(uint16_t h) { return bits_to_float(uint32_t{h} << 16); }
SINKHORN_INLINE uint16_t to_bfloat16(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__F16C__)
SINKHORN_INLINE float from_float16(uint16_t h) { return _cvtsh_ss(h); }
SINKHORN_INLINE uint16_t to_float16(float x) { return static_cast<uint16_t>(_cvtss_sh(x, 0)); }
#else
SINKHORN_INLINE float from_float16(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // Shift into place, then rescale by 2^112: subnormals come out right too.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}
SINKHORN_INLINE uint16_t to_float16(float x) {
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: let the float adder round at 2^-24
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfff + odd) >> 13));
}
#endif

template <class T>
SINKHORN_INLINE T load_element(const void* data, Type type, int64_t at) {
  switch (type) {
    case Type::kFloat32: return static_cast<T>(static_cast<const float*>(data)[at]);
    case Type::kFloat64: return static_cast<T>(static_cast<const double*>(data)[at]);
    case Type::kBFloat16:
      return static_cast<T>(from_bfloat16(static_cast<const uint16_t*>(data)[at]));
    case Type::kFloat16:
      return static_cast<T>(from_float16(static_cast<const uint16_t*>(data)[at]));
  }
  return T(0);
}
template <class T>
SINKHORN_INLINE void store_element(void* data, Type type, int64_t at, T x) {
  switch (type) {
    case Type::kFloat32: static_cast<float*>(data)[at] = static_cast<float>(x); break;
    case Type::kFloat64: static_cast<double*>(data)[at] = static_cast<double>(x); break;
    case Type::kBFloat16:
      static_cast<uint16_t*>(data)[at] = to_bfloat16(static_cast<float>(x));
      break;
    case Type::kFloat16:
      static_cast<uint16_t*>(data)[at] = to_float16(static_cast<float>(x));
      break;
  }
}

template <class T>
constexpr Type kTypeOf = sizeof(T) == 8 ? Type::kFloat64 : Type::kFloat32;

SINKHORN_INLINE int64_t offset_of(const View& v, int64_t batch, int64_t head, int64_t row) {
  return batch * v.stride[0] + head * v.stride[1] + row * v.stride[2];
}

// `count` numbers as they would be kept in `type`.
template <class T>
void round_row(Type type, T* x, int64_t count) {
  if (type == Type::kBFloat16) {
    for (int64_t c = 0; c < count; ++c) {
      x[c] = static_cast<T>(from_bfloat16(to_bfloat16(static_cast<float>(x[c]))));
    }
  } else if (type == Type::kFloat16) {
    for (int64_t c = 0; c < count; ++c) {
      x[c] = static_cast<T>(from_float16(to_float16(static_cast<float>(x[c]))));
    }
  }
}

// A contiguous view of compute-type rows, for buffers the kernels own.
template <class T>
SINKHORN_INLINE View rows_view(const T* data, int64_t ld) {
  View v;
  v.data = const_cast<T*>(data);
  v.type = kTypeOf<T>;
  v.stride[2] = ld;
  v.stride[3] = 1;
  return v;
}

template <class T>
void load_row(const View& v, int64_t offset, int64_t count, T* to) {
  const int64_t step = v.stride[3];
  if (v.type == kTypeOf<T> && step == 1) {
    memcpy(to, static_cast<const T*>(v.data) + offset, sizeof(T) * static_cast<size_t>(count));
    return;
  }
  if (v.type == Type::kBFloat16 && step == 1) {
    const uint16_t* from = static_cast<const uint16_t*>(v.data) + offset;
    for (int64_t c = 0; c < count; ++c) to[c] = static_cast<T>(from_bfloat16(from[c]));
    return;
  }
  for (int64_t c = 0; c < count; ++c) to[c] = load_element<T>(v.data, v.type, offset + c * step);
}

template <class T>
void store_row(const View& v, int64_t offset, int64_t count, const T* from) {
  const int64_t step = v.stride[3];
  if (v.type == kTypeOf<T> && step == 1) {
    memcpy(static_cast<T*>(v.data) + offset, from, sizeof(T) * static_cast<size_t>(count));
    return;
  }
  for (int64_t c = 0; c < count; ++c) store_element(v.data, v.type, offset + c * step, from[c]);
}

template <class T>
SINKHORN_INLINE void fill(T* to, int64_t count, T value) {
  for (int64_t c = 0; c < count; ++c) to[c] = value;
}

// Notices NaN and inf in passing: adds 0 times every number, which is 0 unless one is not finite.
template <class T>
class FiniteWatch {
 public:
  SINKHORN_INLINE void see(Vec<T> x) { vectors_ += x * T(0); }
  SINKHORN_INLINE void see(T x) { rest_ += x * T(0); }
  SINKHORN_INLINE bool all_finite() const { return sum_lanes<T>(vectors_) + rest_ == T(0); }

 private:
  Vec<T> vectors_ = {};
  T rest_ = T(0);
};

// Rows of one head: where they lie, or a copy in a tile.
template <class T>
struct Rows {
  const T* data;
  int64_t ld;  // at least the columns rounded up to vectors, or a whole number of vectors itself

  const T* operator[](int64_t r) const { return data + r * ld; }
  bool all_finite(int64_t rows, int64_t cols) const {
    FiniteWatch<T> watch;
    for (int64_t r = 0; r < rows; ++r) {
      int64_t c = 0;
      for (; c + kLanes<T> <= cols; c += kLanes<T>) watch.see(load((*this)[r] + c));
      for (; c < cols; ++c) watch.see((*this)[r][c]);
    }
    return watch.all_finite();
  }
};

SINKHORN_INLINE bool all_real(const uint8_t* real, int64_t rows) {
  bool all = true;
  for (int64_t r = 0; real != nullptr && r < rows; ++r) all &= real[r] != 0;
  return all;
}

// Copies `rows` rows into a tile with row length ld >= cols, zeros behind the columns. A row whose
// `real` flag is 0 becomes 0 whatever it holds: selected, not multiplied.
template <class T>
Rows<T> copy_rows(const View& v, int64_t offset, int64_t rows, int64_t cols, const uint8_t* real,
                  T* tile, int64_t ld) {
  T* to = tile;
  for (int64_t r = 0; r < rows; ++r, to += ld) {
    if (real != nullptr && !real[r]) {
      fill(to, ld, T(0));
    } else {
      load_row(v, offset + r * v.stride[2], cols, to);
      fill(to + cols, ld - cols, T(0));
    }
  }
  return {tile, ld};
}

// The same rows without a copy where they lie densely, are all real and end on a whole vector.
template <class T>
Rows<T> rows_of(const View& v, int64_t offset, int64_t rows, int64_t cols, const uint8_t* real,
                T* tile, int64_t ld) {
  if (v.type == kTypeOf<T> && v.stride[3] == 1 && v.stride[2] == cols && cols % kLanes<T> == 0 &&
      all_real(real, rows)) {
    return {static_cast<const T*>(v.data) + offset, cols};
  }
  return copy_rows(v, offset, rows, cols, real, tile, ld);
}

// to[c][r] = row_of(r)[c]; `to` has rows of length ld_to, zeros behind `rows`.
template <class T, class RowOf>
SINKHORN_INLINE void transpose_rows(const RowOf& row_of, int64_t rows, int64_t cols, T* to,
                                    int64_t ld_to) {
  typedef T Quad __attribute__((vector_size(4 * sizeof(T))));
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    for (int64_t c = 0; c + 4 <= cols; c += 4) {
      Quad a, b, d, e;
      memcpy(&a, row_of(r) + c, sizeof(a));
      memcpy(&b, row_of(r + 1) + c, sizeof(b));
      memcpy(&d, row_of(r + 2) + c, sizeof(d));
      memcpy(&e, row_of(r + 3) + c, sizeof(e));
      const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Quad de_low = __builtin_shufflevector(d, e, 0, 4, 1, 5);
      const Quad de_high = __builtin_shufflevector(d, e, 2, 6, 3, 7);
      const Quad out[4] = {__builtin_shufflevector(ab_low, de_low, 0, 1, 4, 5),
                           __builtin_shufflevector(ab_low, de_low, 2, 3, 6, 7),
                           __builtin_shufflevector(ab_high, de_high, 0, 1, 4, 5),
                           __builtin_shufflevector(ab_high, de_high, 2, 3, 6, 7)};
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) memcpy(to + (c + q) * ld_to + r, &out[q], sizeof(Quad));
    }
    for (int64_t d = cols - cols % 4; d < cols; ++d) {
      for (int64_t q = 0; q < 4; ++q) to[d * ld_to + r + q] = row_of(r + q)[d];
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t q = r; q < rows; ++q) to[c * ld_to + q] = row_of(q)[c];
    if (rows < ld_to) fill(to + c * ld_to + rows, ld_to - rows, T(0));
  }
}
template <class T>
void transpose(const Rows<T>& from, int64_t rows, int64_t cols, T* to, int64_t ld_to) {
  transpose_rows<T>([=](int64_t r) { return from[r]; }, rows, cols, to, ld_to);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
