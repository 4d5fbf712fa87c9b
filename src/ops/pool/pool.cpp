#include "ops/pool/pool.h"

#include <ATen/ops/empty.h>

#include "ops/autograd.h"

namespace sinkhorn::ops {

void check_pool(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                const OptionalTensor& mask) {
  const std::string_view op = "pool";
  const PoolMode parsed = parse_pool_mode(op, mode);
  TORCH_CHECK_VALUE(causal || parsed != PoolMode::kRecent,
                    "pool: mode 'recent' needs causal=True, got causal=False");
  check_block(op, block);
  check_float(op, "x", x);
  check_rank(op, "x", x, 3);
  check_not_empty(op, "x", x, "B, L, E");
  check_mask(op, "mask", x, mask, {x.sym_size(0), x.sym_size(1)}, "[B, L]");
}

PoolParams pool_params(const Tensor& x, const Tensor& pooled, int64_t block, std::string_view mode,
                       bool causal, const MaskBytes& mask) {
  PoolParams p{};
  p.batch = x.size(0);
  p.length = x.size(1);
  p.width = x.size(2);
  p.block = std::min(block, x.size(1));
  p.blocks = pooled.size(1);
  p.mode = parse_pool_mode("pool", mode);
  p.causal = causal;
  p.compute64 = x.scalar_type() == at::kDouble;
  p.real = mask.data();
  p.x = view_of(x);
  p.pooled = view_of(pooled);
  return p;
}

namespace {

using FwdSignature = Tensor(const Tensor&, int64_t, std::string_view, bool, const OptionalTensor&);
using BwdSignature = Tensor(const Tensor&, const OptionalTensor&, c10::SymInt, int64_t,
                            std::string_view, bool);

Tensor call_fwd(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                const OptionalTensor& mask) {
  static const auto op = find_op<FwdSignature>("pool_fwd");
  return op.call(x, block, mode, causal, mask);
}

class PoolFunction : public torch::autograd::Function<PoolFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t block, std::string mode,
                        bool causal, const OptionalTensor& mask) {
    at::AutoDispatchBelowAutograd below;
    const Tensor pooled = call_fwd(x, block, mode, causal, mask);  // which looks at x first
    context->save_for_backward({or_undefined(mask)});
    context->saved_data["length"] = x.sym_size(1);
    context->saved_data["block"] = block;
    context->saved_data["mode"] = mode;
    context->saved_data["causal"] = causal;
    return pooled;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<BwdSignature>("pool_bwd");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const Tensor grad =
        op.call(grads[0], or_none(saved[0]), data["length"].toSymInt(), data["block"].toInt(),
                data["mode"].toStringRef(), data["causal"].toBool());
    return {grad, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor pool_autograd(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                     const OptionalTensor& mask) {
  return PoolFunction::apply(x, block, std::string(mode), causal, mask);
}

Tensor pool_fwd_meta(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                     const OptionalTensor& mask) {
  check_pool(x, block, mode, causal, mask);
  return at::empty_symint({x.sym_size(0), block_count(x.sym_size(1), block), x.sym_size(2)},
                          x.options());
}

Tensor pool_bwd_meta(const Tensor& grad, const OptionalTensor&, c10::SymInt length, int64_t,
                     std::string_view, bool) {
  return at::empty_symint({grad.sym_size(0), std::move(length), grad.sym_size(2)}, grad.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("pool", pool_autograd);
  m.impl("pool_fwd", no_second_derivative());
  m.impl("pool_bwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) { m.impl("pool", call_fwd); }
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("pool_fwd", pool_fwd_meta);
  m.impl("pool_bwd", pool_bwd_meta);
}

}  // namespace sinkhorn::ops
