// block_logits: a linear sort network with its heads apart; add_gumbel: noise on any logits.
//
// A product of a few rows takes a library as long as its launches: bias, noise and the change of
// layout forward, and backward three sums and two changes of layout. A kernel does each way at
// once.
#include "kernels/cuda/block_logits.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/autograd.h"
#include "ops/fused/fused.h"
#include "ops/fused/kernel_call.h"

namespace sinkhorn::ops {
namespace {

using BlockLogitsGradients = std::tuple<Tensor, Tensor, Tensor>;  // pooled, weight, bias

void check_block_logits(const Tensor& pooled, const Tensor& weight, const Tensor& bias,
                        int64_t heads, const OptionalTensor& draws) {
  const std::string_view op = "block_logits";
  check_float(op, "pooled", pooled);
  check_rank(op, "pooled", pooled, 3);
  check_rank(op, "weight", weight, 2);
  TORCH_CHECK_VALUE(heads >= 1, "block_logits: heads must be at least 1, got ", heads);
  check_device(op, pooled, "weight", weight);
  check_device(op, pooled, "bias", bias);
  const auto batch = pooled.sym_size(0), blocks = pooled.sym_size(1), rows = weight.sym_size(0);
  check_sizes(op, "weight", weight, {rows, pooled.sym_size(2)}, "[H * M, E]");
  check_sizes(op, "bias", bias, {rows}, "[H * M]");
  SINKHORN_CHECK_SIZE((rows % heads).sym_eq(0), "block_logits: weight has ", rows,
                      " rows, which is not a multiple of heads ", heads);
  SINKHORN_CHECK_SIZE(blocks.sym_le(rows / heads), "block_logits: pooled has ", blocks,
                      " blocks, weight has columns for ", rows / heads);
  if (!draws.has_value()) return;
  check_device(op, pooled, "draws", *draws);
  check_sizes(op, "draws", *draws, {batch, heads, blocks, blocks}, "[B, H, N, N]");
}

Tensor gumbel(const Tensor& draws) { return -draws.detach().clamp_min(1e-30).log(); }

bool is_float32_on_cuda(const Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kFloat; }

bool kernel_covers(const Tensor& pooled, const Tensor& weight, const Tensor& bias,
                   const OptionalTensor& draws) {
  if (!is_float32_on_cuda(pooled) || !is_float32_on_cuda(weight) || !is_float32_on_cuda(bias) ||
      (draws.has_value() && !is_float32_on_cuda(*draws))) {
    return false;
  }
  const auto rows = (pooled.sym_size(0) * pooled.sym_size(1)).maybe_as_int();
  const auto columns = weight.sym_size(0).maybe_as_int(), width = weight.sym_size(1).maybe_as_int();
  return rows.has_value() && columns.has_value() && width.has_value() &&
         cuda::covers_block_logits(*rows, *columns, *width);
}

cuda::BlockLogitsParams params_of(const Tensor& pooled, const Tensor& weight, int64_t heads) {
  cuda::BlockLogitsParams p;
  p.batch = pooled.size(0);
  p.blocks = pooled.size(1);
  p.width = pooled.size(2);
  p.heads = heads;
  p.columns = weight.size(0) / heads;
  p.pooled = pooled.const_data_ptr<float>();
  p.weight = weight.const_data_ptr<float>();
  return p;
}

Tensor block_logits_cuda(const Tensor& pooled, const Tensor& weight, const Tensor& bias,
                         int64_t heads, const OptionalTensor& draws) {
  const c10::DeviceGuard guard(pooled.device());
  const Tensor rows = pooled.contiguous(), plain = weight.contiguous(), more = bias.contiguous();
  const Tensor drawn = draws.has_value() ? draws->contiguous() : Tensor();
  const int64_t blocks = pooled.size(1);
  const Tensor logits = at::empty({pooled.size(0), heads, blocks, blocks}, pooled.options());
  cuda::BlockLogitsParams p = params_of(rows, plain, heads);
  p.bias = more.const_data_ptr<float>();
  p.draws = data_or_null<float>(drawn);
  p.logits = logits.data_ptr<float>();
  cuda::launch_block_logits_fwd(p, current_stream(pooled));
  return logits;
}

Tensor block_logits_meta(const Tensor& pooled, const Tensor&, const Tensor&, int64_t heads,
                         const OptionalTensor&) {
  const auto blocks = pooled.sym_size(1);
  return at::empty_symint({pooled.sym_size(0), heads, blocks, blocks}, pooled.options());
}

BlockLogitsGradients block_logits_bwd_cuda(const Tensor& grad, const Tensor& pooled,
                                           const Tensor& weight) {
  const c10::DeviceGuard guard(pooled.device());
  const Tensor rows = pooled.contiguous(), plain = weight.contiguous();
  const Tensor grad_logits = grad.contiguous();
  const Tensor grad_pooled = at::empty(rows.sizes(), rows.options());
  const Tensor grad_weight = at::empty(plain.sizes(), plain.options());
  const Tensor grad_bias = at::empty({plain.size(0)}, plain.options());
  cuda::BlockLogitsParams p = params_of(rows, plain, grad.size(1));
  p.grad = grad_logits.const_data_ptr<float>();
  p.grad_pooled = grad_pooled.data_ptr<float>();
  p.grad_weight = grad_weight.data_ptr<float>();
  p.grad_bias = grad_bias.data_ptr<float>();
  cuda::launch_block_logits_bwd(p, current_stream(pooled));
  return {grad_pooled, grad_weight, grad_bias};
}

BlockLogitsGradients block_logits_bwd_meta(const Tensor&, const Tensor& pooled,
                                           const Tensor& weight) {
  return {at::empty_symint(pooled.sym_sizes(), pooled.options()),
          at::empty_symint(weight.sym_sizes(), weight.options()),
          at::empty_symint({weight.sym_size(0)}, weight.options())};
}

Tensor call_fwd(const Tensor& pooled, const Tensor& weight, const Tensor& bias, int64_t heads,
                const OptionalTensor& draws) {
  static const auto op = find_op<decltype(block_logits_cuda)>("block_logits_fwd");
  return op.call(pooled, weight, bias, heads, draws);
}

class BlockLogitsFunction : public torch::autograd::Function<BlockLogitsFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& pooled, const Tensor& weight,
                        const Tensor& bias, int64_t heads, const OptionalTensor& draws) {
    at::AutoDispatchBelowAutograd below;
    context->save_for_backward({pooled, weight});
    return call_fwd(pooled, weight, bias, heads, draws);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<decltype(block_logits_bwd_cuda)>("block_logits_bwd");
    const auto saved = context->get_saved_variables();
    auto [pooled, weight, bias] = op.call(grads[0], saved[0], saved[1]);
    return {pooled, weight, bias, Tensor(), Tensor()};
  }
};

Tensor block_logits_op(const Tensor& pooled, const Tensor& weight, const Tensor& bias,
                       int64_t heads, const OptionalTensor& draws) {
  check_block_logits(pooled, weight, bias, heads, draws);
  if (kernel_covers(pooled, weight, bias, draws)) {
    if (!torch::autograd::compute_requires_grad(pooled, weight, bias)) {
      return call_fwd(pooled, weight, bias, heads, draws);
    }
    return BlockLogitsFunction::apply(pooled, weight, bias, heads, draws);
  }
  const auto blocks = pooled.sym_size(1), columns = weight.sym_size(0) / heads;
  Tensor y = linear(pooled, weight, bias, {})
                 .view_symint({pooled.sym_size(0), blocks, heads, columns})
                 .transpose(1, 2);
  // The gradient of a slice, be it the whole, is a tensor of zeros and a copy into it.
  if (blocks != columns) y = y.slice_symint(3, 0, blocks);
  return draws.has_value() ? add_gumbel(y, *draws) : y;
}

void check_add_gumbel(const Tensor& logits, const Tensor& draws) {
  check_float("add_gumbel", "logits", logits);
  check_device("add_gumbel", logits, "draws", draws);
  check_sizes("add_gumbel", "draws", draws, logits.sym_sizes(), "the shape of logits");
}

bool gumbel_kernel_covers(const Tensor& logits, const Tensor& draws) {
  if (!is_float32_on_cuda(logits) || !is_float32_on_cuda(draws) || logits.dim() != 4) return false;
  const auto count = logits.sym_numel().maybe_as_int();
  return count.has_value() && cuda::covers_add_gumbel(*count);
}

Tensor add_gumbel_cuda(const Tensor& logits, const Tensor& draws) {
  const c10::DeviceGuard guard(logits.device());
  const Tensor drawn = draws.contiguous();
  const Tensor result = at::empty(logits.sizes(), logits.options());
  cuda::GumbelParams p;
  for (int d = 0; d < 4; ++d) p.sizes[d] = logits.size(d);
  p.logits = view_of(logits);
  p.draws = drawn.const_data_ptr<float>();
  p.result = result.data_ptr<float>();
  cuda::launch_add_gumbel(p, current_stream(logits));
  return result;
}

Tensor add_gumbel_meta(const Tensor& logits, const Tensor&) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

Tensor call_add_gumbel(const Tensor& logits, const Tensor& draws) {
  static const auto op = find_op<decltype(add_gumbel_cuda)>("add_gumbel_fwd");
  return op.call(logits, draws);
}

class AddGumbelFunction : public torch::autograd::Function<AddGumbelFunction> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& logits, const Tensor& draws) {
    at::AutoDispatchBelowAutograd below;
    return call_add_gumbel(logits, draws);
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor()};
  }
};

Tensor add_gumbel_op(const Tensor& logits, const Tensor& draws) {
  check_add_gumbel(logits, draws);
  if (!gumbel_kernel_covers(logits, draws)) return logits + gumbel(draws);
  if (!torch::autograd::compute_requires_grad(logits)) return call_add_gumbel(logits, draws);
  return AddGumbelFunction::apply(logits, draws);
}

}  // namespace

Tensor block_logits(const Tensor& pooled, const Tensor& weight, const Tensor& bias, int64_t heads,
                    const OptionalTensor& draws) {
  static const auto op = find_op<decltype(block_logits_op)>("block_logits");
  return op.call(pooled, weight, bias, heads, draws);
}

Tensor add_gumbel(const Tensor& logits, const Tensor& draws) {
  static const auto op = find_op<decltype(add_gumbel_op)>("add_gumbel");
  return op.call(logits, draws);
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) {
  m.impl("block_logits", block_logits_op);
  m.impl("add_gumbel", add_gumbel_op);
}
TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("block_logits_fwd", no_second_derivative());
  m.impl("block_logits_bwd", no_second_derivative());
  m.impl("add_gumbel_fwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("block_logits_fwd", block_logits_cuda);
  m.impl("block_logits_bwd", block_logits_bwd_cuda);
  m.impl("add_gumbel_fwd", add_gumbel_cuda);
}
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("block_logits_fwd", block_logits_meta);
  m.impl("block_logits_bwd", block_logits_bwd_meta);
  m.impl("add_gumbel_fwd", add_gumbel_meta);
}

}  // namespace sinkhorn::ops
