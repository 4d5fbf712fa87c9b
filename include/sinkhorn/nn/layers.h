// The plain parts of a Transformer. Parameters stay in their own type (float32 master weights);
// what a part computes in is the Context's, so that bf16 training needs no second set of modules.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <vector>

namespace sinkhorn::nn {

// What a forward pass is told beside its input.
struct Context {
  std::optional<at::Tensor> mask{};          // [B, L] bool, true = real token
  std::optional<at::ScalarType> compute{};   // type of products; the parameters' own by default
  std::vector<at::Tensor>* sorts = nullptr;  // where given, every sorting layer appends its R
};

// y = x W' + b. Glorot uniform weights, zero bias, as Tensor2Tensor does.
class Linear : public torch::nn::Module {
 public:
  // parts: how many equal maps share the weight, each initialised as one of its own.
  Linear(int64_t in, int64_t out, bool bias, int64_t parts = 1);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  // [out, in], [out]
};

// Normalises in the parameters' type and hands on the type to compute in.
class LayerNorm : public torch::nn::Module {
 public:
  explicit LayerNorm(int64_t width);
  at::Tensor forward(const at::Tensor& x, const Context& context);

  at::Tensor weight, bias;  // [E]
};

// W2 dropout(relu(W1 x)).
class FeedForward : public torch::nn::Module {
 public:
  FeedForward(int64_t width, int64_t inner, double dropout);
  at::Tensor forward(const at::Tensor& x);

 private:
  std::shared_ptr<Linear> in_, out_;
  double dropout_;
};

// Token vectors times sqrt(d) plus sinusoidal positions: half sines, half cosines, wavelengths from
// 2 pi to 10,000 * 2 pi. Weights are normal with deviation 1 / sqrt(d).
class Embedding : public torch::nn::Module {
 public:
  // longest: sequences expected; longer ones work too.
  Embedding(int64_t vocab, int64_t width, int64_t longest = 0);
  at::Tensor forward(const at::Tensor& ids);  // [B, L] -> [B, L, E]

  at::Tensor weight;  // [V, E]

 private:
  at::Tensor positions(int64_t length, const at::TensorOptions& options);
  int64_t longest_;
  // The positions' tables, the last in use. Earlier ones stay: a captured graph may read them.
  std::vector<at::Tensor> tables_;
};

// Runs f(inputs) without keeping its intermediates; backward runs it again from the same random
// state and adds to the parameters' gradients. inputs: those that carry gradients.
at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
                      const std::vector<at::Tensor>& inputs);

}  // namespace sinkhorn::nn
