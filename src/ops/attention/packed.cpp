#include "ops/attention/packed.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace sinkhorn::ops {

bool are_packed(const Tensor& query, const Tensor& key, const Tensor& value) {
  for (const Tensor& x : {query, key, value}) {
    if (at::isTensorSubclassLike(x) || !x.has_storage() || x.sizes() != query.sizes()) return false;
  }
  const int64_t heads = query.size(1), length = query.size(2), width = query.size(3);
  const int64_t part = heads * width, token = 3 * part;
  const std::array<int64_t, 4> strides = {length * token, width, token, 1};
  int64_t offset = query.storage_offset();
  for (const Tensor& x : {query, key, value}) {
    if (!x.is_alias_of(query) || x.scalar_type() != query.scalar_type() ||
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
