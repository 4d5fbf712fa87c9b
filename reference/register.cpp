// Offers the reference to Python as torch.ops.sinkhorn_reference.*, with the schemas of
// docs/spec.md less dropout_p. A definition given with its function is CompositeImplicitAutograd:
// the dispatcher looks through it to the ATen calls inside, so autograd flows.
#include <torch/library.h>

#include "reference.h"

TORCH_LIBRARY(sinkhorn_reference, m) {
  m.def("pool(Tensor x, int block, str mode, bool causal, Tensor? mask=None) -> Tensor",
        &sinkhorn::reference::pool);
  m.def(
      "balance(Tensor logits, int iterations, float temperature, str causal=\"none\", "
      "str columns=\"full\", int window=0, Tensor? noise=None, Tensor? block_mask=None) -> Tensor",
      &sinkhorn::reference::balance);
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? sort, int block, "
      "str causal=\"none\", str combine=\"concat\", int window=0, Tensor? mask=None, "
      "float? scale=None) -> Tensor",
      &sinkhorn::reference::attention);
  m.def(
      "sortcut(Tensor query, Tensor key, Tensor value, Tensor sort, int block, int budget, "
      "Tensor? mask=None, float? scale=None) -> Tensor",
      &sinkhorn::reference::sortcut);
}
