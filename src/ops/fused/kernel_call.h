// What the fused operators need to call a CUDA kernel.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "ops/common.h"
#include "ops/composite/rng.h"
#include "ops/stream.h"

namespace sinkhorn::ops {

inline bool is_kernel_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

// Contiguous, and aligned for accesses of 16 bytes.
inline bool is_plain(const Tensor& x) {
  return x.is_contiguous() && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}
inline Tensor aligned(const Tensor& x) {
  const Tensor plain = x.contiguous();
  return is_plain(plain) ? plain : plain.clone();
}

// A result that a call does not have.
inline Tensor nothing(const at::TensorOptions& options) { return at::empty({0}, options); }

// int64 [2] on the device of `like`, or nothing without dropout.
inline Tensor draw_or_nothing(double dropout_p, const Tensor& like) {
  if (dropout_p == 0.0) return nothing(like.options().dtype(at::kLong));
  return composite::draw_rng(dropout_p, like);
}

inline const int64_t* rng_data(const Tensor& rng) {
  return rng.numel() == 2 ? rng.const_data_ptr<int64_t>() : nullptr;
}

template <class T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data_ptr()) : nullptr;
}

}  // namespace sinkhorn::ops
