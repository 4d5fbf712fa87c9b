#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/cpu/dispatch.h"
#include "ops/pool/pool.h"

namespace sinkhorn::ops {
namespace {

Tensor pool_fwd_cpu(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                    const OptionalTensor& mask) {
  check_pool(x, block, mode, causal, mask);
  const int64_t blocks = (x.size(1) - 1) / block + 1;
  const Tensor pooled = at::empty({x.size(0), blocks, x.size(2)}, x.options());
  const MaskBytes bytes(mask);
  cpu::kernels().pool_fwd(pool_params(x, pooled, block, mode, causal, bytes), executor());
  return pooled;
}

Tensor pool_bwd_cpu(const Tensor& grad, const OptionalTensor& mask, int64_t length, int64_t block,
                    std::string_view mode, bool causal) {
  const Tensor result = at::empty({grad.size(0), length, grad.size(2)}, grad.options());
  const MaskBytes bytes(mask);
  cpu::kernels().pool_bwd(pool_params(result, grad, block, mode, causal, bytes), executor());
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CPU, m) {
  m.impl("pool_fwd", pool_fwd_cpu);
  m.impl("pool_bwd", pool_bwd_cpu);
}

}  // namespace sinkhorn::ops
