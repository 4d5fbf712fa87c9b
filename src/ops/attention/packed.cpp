#include "ops/attention/packed.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace sinkhorn::ops {

bool are_packed(at::ArrayRef<Tensor> parts) {
  const Tensor& first = parts[0];
  for (const Tensor& x : parts) {
    if (at::isTensorSubclassLike(x) || !x.has_storage() || x.sizes() != first.sizes()) return false;
  }
  const int64_t heads = first.size(1), length = first.size(2), width = first.size(3);
  const int64_t part = heads * width, token = static_cast<int64_t>(parts.size()) * part;
  const std::array<int64_t, 4> strides = {length * token, width, token, 1};
  int64_t offset = first.storage_offset();
  for (const Tensor& x : parts) {
    if (!x.is_alias_of(first) || x.scalar_type() != first.scalar_type() ||
        x.strides() != at::IntArrayRef(strides) || x.storage_offset() != offset) {
      return false;
    }
    offset += part;
  }
  return true;
}

std::array<Tensor, 3> allocate_gradients(const Tensor& query, const Tensor& key,
                                         const Tensor& value, bool packed) {
  if (!packed) return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
  const Tensor all = at::empty_symint(
      {query.sym_size(0), query.sym_size(2), 3, query.sym_size(1), query.sym_size(3)},
      query.options());
  const auto part = [&](int64_t i) { return all.select(2, i).transpose(1, 2); };
  return {part(0), part(1), part(2)};
}

}  // namespace sinkhorn::ops
