#include "ops/fused/products.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>

namespace sinkhorn::ops {

Tensor with_rows(const Tensor& weight, int64_t missing) {
  return missing > 0 ? at::constant_pad_nd(weight, {0, 0, 0, missing}) : weight;
}

void write_product(const Tensor& a, const Tensor& b, Tensor& out) {
  if (a.scalar_type() == out.scalar_type()) {
    at::mm_out(out, a.t(), b);
  } else if (a.is_cuda() && out.scalar_type() == at::kFloat) {
    at::mm_out(out, a.t(), b, at::kFloat);
  } else {
    out.copy_(at::mm(a.t(), b));
  }
}

SideWorkPtr side_work_for(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  constexpr int64_t kFewNumbers = int64_t{1} << 21;  // 128 tiles of 128 x 128
  const SideWorkPtr side = SideScope::current();
  const bool serves = side && x.numel() <= kFewNumbers && side->accepts(weight) &&
                      (!bias.has_value() || side->accepts(*bias));
  return serves ? side : SideWorkPtr();
}

Tensor in_type_of(const Tensor& x, const Tensor& parameter, const OptionalTensor& copy) {
  return copy.has_value() ? *copy : parameter.to(x.scalar_type());
}

}  // namespace sinkhorn::ops
