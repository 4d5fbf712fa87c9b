// Parameters of the CPU kernels of attention and sortcut, made from tensors.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/dispatch.h"
#include "ops/attention/packed.h"
#include "ops/common.h"

namespace sinkhorn::ops {

// The tensors must outlive the call; the mask is kept here.
struct AttentionCall {
  AttentionCall(const Tensor& query, const Tensor& key, const Tensor& value,
                const OptionalTensor& sort, int64_t block, const OptionalTensor& given_mask,
                std::optional<double> scale)
      : mask(given_mask) {
    SortParams& s = p.sort;
    s.batch = query.size(0);
    s.heads = query.size(1);
    s.length = key.size(2);
    s.width = query.size(3);
    s.block = std::min(block, s.length);
    s.blocks = (s.length - 1) / s.block + 1;
    s.rows = s.blocks;
    s.compute64 = query.scalar_type() == at::kDouble;
    s.real = mask.data();
    s.key = view_of(key);
    s.value = view_of(value);
    if (sort.has_value()) s.sort = view_of(*sort);
    p.queries = query.size(2);
    p.query = view_of(query);
    p.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(s.width)));
  }

  void set_saved(const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
                 const Tensor& sorted_value, const Tensor& weight) {
    p.out = view_of(out);
    p.stats = stats.data_ptr();
    saved_key = sorted_key;
    saved_value = sorted_value;
    working_key = sorted_key.to(compute_type(sorted_key.scalar_type()));
    working_value = sorted_value.to(compute_type(sorted_value.scalar_type()));
    p.sort.sorted_key = working_key.data_ptr();
    p.sort.sorted_value = working_value.data_ptr();
    p.sort.weight = weight.data_ptr();
  }
  // After forward: the sorted copies are kept in the type of the tokens, rounded once.
  void keep_sorted() const {
    if (!saved_key.is_same(working_key)) saved_key.copy_(working_key);
    if (!saved_value.is_same(working_value)) saved_value.copy_(working_value);
  }

  MaskBytes mask;
  Tensor saved_key, saved_value, working_key, working_value;  // the kernels' are of compute type
  AttentionParams p{};
};

// The gradients of one call and the buffers they pass through.
class AttentionGradients {
 public:
  // results: memory for the gradients of query, key and value.
  AttentionGradients(AttentionCall& call, const Tensor& grad, const std::array<Tensor, 3>& results,
                     const OptionalTensor& sort)
      : query_(results[0]),
        key_(results[1]),
        value_(results[2]),
        sort_type_(sort.has_value() ? sort->scalar_type() : query_.scalar_type()) {
    SortParams& s = call.p.sort;
    const auto options = query_.options().dtype(compute_type(query_.scalar_type()));
    working_key_ = working(key_, options);
    working_value_ = working(value_, options);
    sort_ = at::empty({0}, options);
    if (sort.has_value()) {
      sort_ = at::empty(sort->sizes(), options);
      s.grad_sort = sort_.data_ptr();
    }
    s.grad_key = working_key_.data_ptr();
    s.grad_value = working_value_.data_ptr();
    call.p.grad_query = view_of(query_);
    call.p.grad_out = view_of(grad);
    for (const Tensor& x : {query_, working_key_, working_value_, sort_}) prefer_large_pages(x);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> result() const {
    if (!key_.is_same(working_key_)) key_.copy_(working_key_);
    if (!value_.is_same(working_value_)) value_.copy_(working_value_);
    return {query_, key_, value_, sort_.to(sort_type_)};
  }

 private:
  // The kernels add up in rows one behind another, in the type of sums.
  static Tensor working(const Tensor& result, const at::TensorOptions& options) {
    const bool as_it_is = result.is_contiguous() &&
                          result.scalar_type() == c10::typeMetaToScalarType(options.dtype());
    return as_it_is ? result : at::empty(result.sizes(), options);
  }

  Tensor query_, key_, value_, working_key_, working_value_, sort_;
  at::ScalarType sort_type_;
};

}  // namespace sinkhorn::ops
