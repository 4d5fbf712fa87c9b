#include "ops/pool/pooled.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/autograd.h"
#include "ops/pool/pool.h"

namespace sinkhorn::ops {

void check_pool_spread(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                       int64_t block, const c10::List<std::string>& modes,
                       const c10::List<bool>& causal) {
  const size_t count = grads.size();
  TORCH_CHECK_VALUE((count == 1 || count == 2) && modes.size() == count && causal.size() == count,
                    "pool_spread: one or two gradients, and a mode and a causal for each; got ",
                    count, ", ", modes.size(), " and ", causal.size());
  for (size_t i = 0; i < count; ++i) {
    check_pool(onto, block, modes.get(i), causal.get(i), mask);
    check_device("pool_spread", onto, "grads", grads[i]);
    const auto blocks = block_count(onto.sym_size(1), block);
    check_sizes("pool_spread", "grads", grads[i], {onto.sym_size(0), blocks, onto.sym_size(2)},
                "[B, N, E]");
    const auto type = grads[i].scalar_type();
    TORCH_CHECK_VALUE(type == onto.scalar_type() || type == compute_type(onto.scalar_type()),
                      "pool_spread: grads must have the type of onto, ", onto.scalar_type(),
                      ", or the one that its sums run in, got ", type);
  }
}

namespace {

using FwdSignature = Tensor(const Tensor&, int64_t, std::string_view, bool, const OptionalTensor&);
using BwdSignature = Tensor(const Tensor&, const OptionalTensor&, c10::SymInt, int64_t,
                            std::string_view, bool);
using SpreadSignature = Tensor(const Tensor&, at::TensorList, const OptionalTensor&, int64_t,
                               const c10::List<std::string>&, const c10::List<bool>&);

Tensor pool_wide(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                 const OptionalTensor& mask) {
  static const auto op = find_op<FwdSignature>("pool_fwd");
  return op.call(x, block, mode, causal, mask).to(compute_type(x.scalar_type()));
}

Tensor call_pool_wide(const Tensor& x, int64_t block, const PoolKind& kind,
                      const OptionalTensor& mask) {
  static const auto op = find_op<FwdSignature>("pool_wide");
  return op.call(x, block, kind.mode, kind.causal, mask);
}

class PooledFunction : public torch::autograd::Function<PooledFunction> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& x, int64_t block,
                               const std::vector<PoolKind>& kinds, const OptionalTensor& mask) {
    at::AutoDispatchBelowAutograd below;
    context->set_materialize_grads(false);
    context->save_for_backward({or_undefined(mask)});
    context->saved_data["block"] = block;
    context->saved_data["sizes"] = x.sizes().vec();
    c10::List<std::string> modes;
    c10::List<bool> causal;
    variable_list outputs = {x};
    for (const PoolKind& kind : kinds) {
      modes.push_back(kind.mode);
      causal.push_back(kind.causal);
      outputs.push_back(call_pool_wide(x, block, kind, mask));
    }
    context->saved_data["type"] = static_cast<int64_t>(x.scalar_type());
    context->saved_data["modes"] = modes;
    context->saved_data["causal"] = causal;
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto spread = find_op<SpreadSignature>("pool_spread");
    auto& data = context->saved_data;
    const auto all_modes = data["modes"].toList(), all_causal = data["causal"].toList();
    std::vector<Tensor> pools;
    c10::List<std::string> modes;
    c10::List<bool> causal;
    for (size_t i = 1; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      pools.push_back(grads[i]);
      modes.push_back(all_modes.get(i - 1).toStringRef());
      causal.push_back(all_causal.get(i - 1).toBool());
    }
    variable_list result(4);
    result[0] = grads[0];
    if (pools.empty()) return result;
    if (!result[0].defined()) {
      const auto type = static_cast<at::ScalarType>(data["type"].toInt());
      result[0] = at::zeros(data["sizes"].toIntVector(), pools[0].options().dtype(type));
    }
    result[0] = spread.call(result[0], pools, or_none(context->get_saved_variables()[0]),
                            data["block"].toInt(), modes, causal);
    return result;
  }
};

Tensor pool_spread_meta(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                        int64_t block, const c10::List<std::string>& modes,
                        const c10::List<bool>& causal) {
  check_pool_spread(onto, grads, mask, block, modes, causal);
  return at::empty_symint(onto.sym_sizes(), onto.options());
}

Tensor pool_spread_cpu(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                       int64_t block, const c10::List<std::string>& modes,
                       const c10::List<bool>& causal) {
  check_pool_spread(onto, grads, mask, block, modes, causal);
  return pool_spread_plain(onto, grads, mask, block, modes, causal);
}

}  // namespace

Tensor pool_spread_plain(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                         int64_t block, const c10::List<std::string>& modes,
                         const c10::List<bool>& causal) {
  static const auto op = find_op<BwdSignature>("pool_bwd");
  Tensor sum = onto;
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor grad = grads[i].to(onto.scalar_type());
    sum = op.call(grad, mask, onto.sym_size(1), block, modes.get(i), causal.get(i)).add_(sum);
  }
  return sum;
}

Pooled pooled(const Tensor& x, int64_t block, const std::vector<PoolKind>& kinds,
              const OptionalTensor& mask) {
  Pooled result{x, {}};
  if (!torch::autograd::compute_requires_grad(x)) {
    for (const PoolKind& k : kinds) result.pools.push_back(call_pool_wide(x, block, k, mask));
    return result;
  }
  variable_list outputs = PooledFunction::apply(x, block, kinds, mask);
  result.x = outputs[0];
  result.pools.assign(outputs.begin() + 1, outputs.end());
  return result;
}

TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("pool_wide", no_second_derivative());
  m.impl("pool_spread", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) { m.impl("pool_wide", pool_wide); }
TORCH_LIBRARY_IMPL(sinkhorn, CPU, m) { m.impl("pool_spread", pool_spread_cpu); }
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) { m.impl("pool_spread", pool_spread_meta); }

}  // namespace sinkhorn::ops
