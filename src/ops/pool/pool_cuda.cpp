#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/pool.h"
#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"
#include "ops/pool/pool.h"
#include "ops/stream.h"

namespace sinkhorn::ops {
namespace {

// type: of the result
Tensor pool_in(at::ScalarType type, const Tensor& x, int64_t block, std::string_view mode,
               bool causal, const OptionalTensor& mask) {
  check_pool(x, block, mode, causal, mask);
  const c10::DeviceGuard guard(x.device());
  const Tensor rows = x.stride(2) == 1 ? x : x.contiguous();
  const int64_t blocks = (x.size(1) - 1) / block + 1;
  const Tensor pooled = at::empty({x.size(0), blocks, x.size(2)}, x.options().dtype(type));
  const MaskBytes bytes(mask);
  const PoolParams p = pool_params(rows, pooled, block, mode, causal, bytes);
  if (!cuda::covers_pool(p)) return composite::pool(x, block, mode, causal, mask);
  const Tensor scratch = scratch_of(x, cuda::pool_scratch(p));
  cuda::launch_pool_fwd(p, scratch.data_ptr(), current_stream(x));
  return pooled;
}

Tensor pool_fwd_cuda(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                     const OptionalTensor& mask) {
  return pool_in(x.scalar_type(), x, block, mode, causal, mask);
}

Tensor pool_wide_cuda(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                      const OptionalTensor& mask) {
  return pool_in(compute_type(x.scalar_type()), x, block, mode, causal, mask);
}

Tensor pool_bwd_cuda(const Tensor& grad, const OptionalTensor& mask, int64_t length, int64_t block,
                     std::string_view mode, bool causal) {
  const c10::DeviceGuard guard(grad.device());
  const Tensor result = at::empty({grad.size(0), length, grad.size(2)}, grad.options());
  const MaskBytes bytes(mask);
  cuda::PoolGradients call;
  call.pools[0] = pool_params(result, grad, block, mode, causal, bytes);
  if (!cuda::covers_pool(call.pools[0])) {
    // pool is linear: its gradient is the same at any x.
    const Tensor x = at::zeros(result.sizes(), grad.options());
    return composite::recompute_gradients(grad, {x}, [&](const std::vector<Tensor>& inputs) {
      return composite::pool(inputs[0], block, mode, causal, mask);
    })[0];
  }
  const Tensor scratch = scratch_of(grad, cuda::pool_scratch(call.pools[0]));
  call.scratch[0] = scratch.data_ptr();
  cuda::launch_pool_bwd(call, current_stream(grad));
  return result;
}

Tensor pool_spread_cuda(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                        int64_t block, const c10::List<std::string>& modes,
                        const c10::List<bool>& causal) {
  check_pool_spread(onto, grads, mask, block, modes, causal);
  const c10::DeviceGuard guard(onto.device());
  const Tensor plain = onto.stride(2) == 1 ? onto : onto.contiguous();
  const Tensor result = at::empty(onto.sizes(), onto.options());
  const MaskBytes bytes(mask);
  cuda::PoolGradients call;
  call.count = static_cast<int>(grads.size());
  call.onto = view_of(plain);
  std::vector<Tensor> scratch;
  for (size_t i = 0; i < grads.size(); ++i) {
    PoolParams& p = call.pools[i];
    p = pool_params(result, grads[i], block, modes.get(i), causal.get(i), bytes);
    if (!cuda::covers_pool(p)) return pool_spread_plain(onto, grads, mask, block, modes, causal);
    scratch.push_back(scratch_of(onto, cuda::pool_scratch(p)));
    call.scratch[i] = scratch.back().data_ptr();
  }
  cuda::launch_pool_bwd(call, current_stream(onto));
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("pool_fwd", pool_fwd_cuda);
  m.impl("pool_wide", pool_wide_cuda);
  m.impl("pool_bwd", pool_bwd_cuda);
  m.impl("pool_spread", pool_spread_cuda);
}

}  // namespace sinkhorn::ops
