// The operators' schemas. `<op>` is what users call; `<op>_fwd` and `<op>_bwd` are what autograd,
// compilers and kernels see: forward returns beside the result all that backward needs.
#include <torch/library.h>

#include "kernels/cpu/dispatch.h"

TORCH_LIBRARY(sinkhorn, m) {
  m.def("pool(Tensor x, int block, str mode, bool causal, Tensor? mask=None) -> Tensor");
  m.def("pool_fwd(Tensor x, int block, str mode, bool causal, Tensor? mask) -> Tensor");
  m.def(
      "pool_bwd(Tensor grad, Tensor? mask, SymInt length, int block, str mode, bool causal) "
      "-> Tensor");
  m.def("pool_wide(Tensor x, int block, str mode, bool causal, Tensor? mask) -> Tensor");
  m.def(
      "pool_spread(Tensor onto, Tensor[] grads, Tensor? mask, int block, str[] modes, "
      "bool[] causal) -> Tensor");

  m.def(
      "balance(Tensor logits, int iterations, float temperature, str causal=\"none\", "
      "str columns=\"full\", int window=0, Tensor? noise=None, Tensor? block_mask=None) -> Tensor");
  m.def(
      "balance_fwd(Tensor logits, int iterations, float temperature, str causal, str columns, "
      "int window, Tensor? noise, Tensor? block_mask) -> (Tensor, Tensor)");
  m.def(
      "balance_bwd(Tensor grad, Tensor logits, Tensor terms, int iterations, float temperature, "
      "str causal, str columns, int window, Tensor? noise, Tensor? block_mask) -> Tensor");

  // Dropout draws from the default generator.
  const std::vector<at::Tag> draws = {at::Tag::nondeterministic_seeded};
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? sort, int block, "
      "str causal=\"none\", str combine=\"concat\", int window=0, Tensor? mask=None, "
      "float? scale=None, float dropout_p=0.0) -> Tensor",
      draws);
  m.def(
      "attention_fwd(Tensor query, Tensor key, Tensor value, Tensor? sort, int block, str causal, "
      "str combine, int window, Tensor? mask, float? scale, float dropout_p, bool keep=True) "
      "-> (Tensor out, Tensor stats, Tensor sorted_key, Tensor sorted_value, Tensor weight, "
      "Tensor sorted_out, Tensor rng)",
      draws);
  m.def(
      "attention_bwd(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? sort, Tensor "
      "out, "
      "Tensor stats, Tensor sorted_key, Tensor sorted_value, Tensor weight, Tensor sorted_out, "
      "Tensor rng, int block, str causal, str combine, int window, Tensor? mask, float? scale, "
      "float dropout_p, bool packed=False) -> (Tensor, Tensor, Tensor, Tensor)");

  m.def(
      "sortcut(Tensor query, Tensor key, Tensor value, Tensor sort, int block, int budget, "
      "Tensor? mask=None, float? scale=None, float dropout_p=0.0) -> Tensor",
      draws);
  m.def(
      "sortcut_fwd(Tensor query, Tensor key, Tensor value, Tensor sort, int block, int budget, "
      "Tensor? mask, float? scale, float dropout_p) "
      "-> (Tensor out, Tensor stats, Tensor sorted_key, Tensor sorted_value, Tensor weight, "
      "Tensor rng)",
      draws);
  m.def(
      "sortcut_bwd(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor sort, Tensor out, "
      "Tensor stats, Tensor sorted_key, Tensor sorted_value, Tensor weight, Tensor rng, int block, "
      "int budget, Tensor? mask, float? scale, float dropout_p) "
      "-> (Tensor, Tensor, Tensor, Tensor)");

  // Of the training step (ops/fused).
  m.def(
      "add_norm(Tensor x, Tensor part, Tensor weight, Tensor bias, float epsilon, float dropout_p, "
      "ScalarType dtype) -> (Tensor, Tensor)",
      draws);
  m.def(
      "carry_norm(Tensor(a) x, Tensor weight, Tensor bias, float epsilon, ScalarType dtype) "
      "-> (Tensor(a) x, Tensor normed)");
  m.def("norm(Tensor x, Tensor weight, Tensor bias, float epsilon, ScalarType dtype) -> Tensor");
  m.def("residual(Tensor x, Tensor part, float dropout_p) -> Tensor", draws);
  m.def(
      "add_norm_fwd(Tensor x, Tensor? part, Tensor? weight, Tensor? bias, float epsilon, "
      "float dropout_p, ScalarType dtype) "
      "-> (Tensor sum, Tensor normed, Tensor mean, Tensor rstd, Tensor rng)",
      draws);
  m.def(
      "add_norm_bwd(Tensor? grad_sum, Tensor? grad_normed, Tensor sum, Tensor? weight, Tensor "
      "mean, "
      "Tensor rstd, Tensor rng, float dropout_p, ScalarType? part_dtype) "
      "-> (Tensor, Tensor, Tensor, Tensor)");

  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? weight_copy=None, "
      "Tensor? bias_copy=None, bool relu=False, float dropout_p=0.0) -> Tensor",
      draws);
  m.def("linear_fwd(Tensor x, Tensor weight, Tensor? bias, bool relu, float dropout_p) -> Tensor",
        draws);
  m.def(
      "linear_bwd(Tensor grad, Tensor x, Tensor weight, Tensor out, bool bias, bool relu, "
      "float dropout_p, ScalarType dtype) -> (Tensor, Tensor, Tensor)");

  m.def(
      "block_logits(Tensor pooled, Tensor weight, Tensor bias, int heads, Tensor? draws=None) "
      "-> Tensor");
  m.def(
      "block_logits_fwd(Tensor pooled, Tensor weight, Tensor bias, int heads, Tensor? draws) "
      "-> Tensor");
  m.def("block_logits_bwd(Tensor grad, Tensor pooled, Tensor weight) -> (Tensor, Tensor, Tensor)");
  m.def("add_gumbel(Tensor logits, Tensor draws) -> Tensor");
  m.def("add_gumbel_fwd(Tensor logits, Tensor draws) -> Tensor");

  m.def(
      "embed(Tensor(a) weight, Tensor ids, Tensor positions, float scale) "
      "-> (Tensor(a) table, Tensor tokens)");
  m.def("embed_fwd(Tensor weight, Tensor ids, Tensor positions, float scale) -> Tensor");
  m.def("embed_bwd(Tensor(a!) onto, Tensor grad, Tensor ids, float scale) -> ()");

  m.def("cross_entropy(Tensor logits, Tensor targets, int ignored, float smoothing=0.0) -> Tensor");
  m.def(
      "cross_entropy_fwd(Tensor logits, Tensor targets, int ignored, float smoothing, bool keep) "
      "-> (Tensor loss, Tensor grad_logits)");
  m.def("cross_entropy_bwd(Tensor grad, Tensor(a!) grad_logits) -> ()");
  m.def(
      "label_loss(Tensor x, Tensor weight, Tensor targets, int ignored, float smoothing=0.0, "
      "Tensor? weight_copy=None) -> Tensor");
  m.def(
      "label_loss_fwd(Tensor x, Tensor weight, Tensor targets, int ignored, float smoothing) "
      "-> (Tensor loss, Tensor grad_logits, Tensor grad_x)");

  // Of all tensors of a model at once (ops/fused/update.h).
  m.def(
      "note_gradients(Tensor[] gradients, Tensor loss, float clip, Tensor(a!) record, "
      "Tensor(b!) sums) -> Tensor");
  m.def(
      "adam_step(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, float[] decays, Tensor rate, "
      "Tensor? divisor, float beta1, float beta2, float epsilon, Tensor(e!) arrived) -> bool");
  m.def("copy_all(Tensor(a!)[] to, Tensor[] from) -> ()");

  // Which CPU kernels run: baseline, avx2 or avx512.
  m.def("cpu_form() -> str", [] { return std::string(sinkhorn::cpu::form()); });
}
