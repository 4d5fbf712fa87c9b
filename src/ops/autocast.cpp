// Under torch.autocast the operators compute as they are: in the types of what they are given, with
// sums and exponentials in float32. Autocast would cast the products inside of those that are made
// of Torch's operations.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace sinkhorn::ops {
namespace {

void as_it_is(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

void register_all(torch::Library& m) {
  for (const char* name :
       {"pool",          "pool_fwd",      "pool_bwd",     "pool_wide",        "pool_spread",
        "balance",       "balance_fwd",   "balance_bwd",  "attention",        "attention_fwd",
        "attention_bwd", "sortcut",       "sortcut_fwd",  "sortcut_bwd",      "linear",
        "linear_fwd",    "linear_bwd",    "block_logits", "block_logits_fwd", "block_logits_bwd",
        "label_loss",    "label_loss_fwd"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_it_is>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, AutocastCPU, m) { register_all(m); }
TORCH_LIBRARY_IMPL(sinkhorn, AutocastCUDA, m) { register_all(m); }

}  // namespace sinkhorn::ops
