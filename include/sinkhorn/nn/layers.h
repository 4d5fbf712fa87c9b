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

// A parameter in the type that products run in, kept beside it while a CopyScope lives.
class ParameterCopy {
 public:
  // The copy, where there is a fresh one; else none, and the next scope will make it.
  std::optional<at::Tensor> find(const at::Tensor& parameter, at::ScalarType type);

 private:
  friend class CopyScope;
  at::Tensor parameter_, copy_;  // undefined until asked for
  std::optional<at::ScalarType> wanted_{};
  bool fresh_ = false;
};

// A module whose parameters are read in another type than their own.
class CopyHolder {
 public:
  virtual ~CopyHolder() = default;
  virtual std::vector<ParameterCopy*> copies() = 0;
};

// Copies all parameters of the modules within `root` that products have asked for in another type,
// in one go rather than one by one. They serve while the scope lives; no parameter may change
// meanwhile.
class CopyScope {
 public:
  explicit CopyScope(torch::nn::Module& root);
  ~CopyScope();
  CopyScope(const CopyScope&) = delete;
  CopyScope& operator=(const CopyScope&) = delete;

 private:
  std::vector<ParameterCopy*> copies_;
  std::vector<at::Tensor> memory_;  // the copies themselves: a captured graph may read them
};

// While one lives, modules made on this thread leave their weights as memory comes: for a model
// whose parameters are about to be read from a file.
class WithoutInitialization {
 public:
  WithoutInitialization();
  ~WithoutInitialization();
  WithoutInitialization(const WithoutInitialization&) = delete;
  WithoutInitialization& operator=(const WithoutInitialization&) = delete;
};

// Draws a table [V, E] as Tensor2Tensor begins embeddings and outputs of their own: normal, with
// deviation 1 / sqrt(E).
void begin_table(at::Tensor& weight);

// The weights of a projection to labels: scores are x weight'.
struct LabelWeights {
  at::Tensor weight;                 // [V, E]
  std::optional<at::Tensor> copy{};  // in the type of x, where it is at hand
};

at::Tensor scores(const at::Tensor& x, const LabelWeights& labels);  // [..., E] -> [..., V]

// y = x W' + b. Glorot uniform weights, zero bias, as Tensor2Tensor does.
class Linear : public torch::nn::Module, public CopyHolder {
 public:
  // parts: how many equal maps share the weight, each initialised as one of its own.
  Linear(int64_t in, int64_t out, bool bias, int64_t parts = 1);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor relu_forward(const at::Tensor& x, double dropout);  // dropout(relu(y))
  LabelWeights labels(const at::Tensor& x);                      // for x, without the bias
  std::vector<ParameterCopy*> copies() override;

  at::Tensor weight, bias;  // [out, in], [out]

 private:
  ParameterCopy weight_copy_, bias_copy_;
};

// The residual stream between two parts: what the last one gave is not added yet, because the next
// norm does it in passing.
struct Residual {
  at::Tensor sum;        // [B, L, E]
  at::Tensor part{};     // [B, L, E]; undefined: nothing to add
  double dropout = 0.0;  // of the part

  at::Tensor settled() const;  // sum + dropout(part)
};

// Normalises in the parameters' type and hands on the type to compute in.
class LayerNorm : public torch::nn::Module {
 public:
  explicit LayerNorm(int64_t width);
  at::Tensor forward(const at::Tensor& x, const Context& context);
  at::Tensor forward(Residual& x, const Context& context);  // settles x

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
class Embedding : public torch::nn::Module, public CopyHolder {
 public:
  // longest: sequences expected; longer ones work too.
  Embedding(int64_t vocab, int64_t width, int64_t longest = 0);
  at::Tensor forward(const at::Tensor& ids);  // [B, L] -> [B, L, E]
  // The same, and the weights again for what reads them next, labels or another of these: backward
  // then adds the tokens' gradient onto theirs in place. table: weight, or what such a call gave.
  struct Tokens {
    at::Tensor vectors, table;
  };
  Tokens with_table(const at::Tensor& ids, const at::Tensor& table);
  // ids at places of their own, [B, L] int64, all below `end`.
  at::Tensor forward_at(const at::Tensor& ids, const at::Tensor& places, int64_t end);
  LabelWeights labels(const at::Tensor& x, const at::Tensor& table);  // for x
  std::vector<ParameterCopy*> copies() override;

  at::Tensor weight;  // [V, E]

 private:
  ParameterCopy weight_copy_;
  at::Tensor positions(int64_t length, const at::TensorOptions& options);
  double scale() const;
  int64_t longest_;
  // The positions' tables, the last in use. Earlier ones stay: a captured graph may read them.
  std::vector<at::Tensor> tables_;
};

// Runs f(inputs) without keeping its intermediates; backward runs it again from the same random
// state and adds to the parameters' gradients. inputs: those that carry gradients.
at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
                      const std::vector<at::Tensor>& inputs);

}  // namespace sinkhorn::nn
