#include "sinkhorn/nn/layers.h"

#include <ATen/Context.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cmath>

#include "ops/fused/fused.h"
#include "ops/fused/update.h"

namespace sinkhorn::nn {

std::optional<at::Tensor> ParameterCopy::find(const at::Tensor& parameter, at::ScalarType type) {
  if (parameter.scalar_type() == type) return std::nullopt;
  const bool serves =
      fresh_ && copy_.defined() && copy_.scalar_type() == type && parameter_.is_same(parameter);
  parameter_ = parameter;
  wanted_ = type;
  return serves ? std::optional<at::Tensor>(copy_) : std::nullopt;
}

CopyScope::CopyScope(torch::nn::Module& root) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> from;
  for (const auto& module : root.modules(/*include_self=*/false)) {
    auto* holder = dynamic_cast<CopyHolder*>(module.get());
    if (holder == nullptr) continue;
    for (ParameterCopy* copy : holder->copies()) {
      if (!copy->wanted_.has_value()) continue;
      const at::Tensor& parameter = copy->parameter_;
      const auto options = parameter.options().dtype(*copy->wanted_);
      if (!copy->copy_.defined() || copy->copy_.scalar_type() != *copy->wanted_ ||
          copy->copy_.device() != parameter.device()) {
        copy->copy_ = at::empty(parameter.sizes(), options);
      }
      copies_.push_back(copy);
      from.push_back(parameter.detach());
      memory_.push_back(copy->copy_);
    }
  }
  if (memory_.empty()) return;
  ops::copy_all(memory_, from);
  for (ParameterCopy* copy : copies_) copy->fresh_ = true;
}

CopyScope::~CopyScope() {
  for (ParameterCopy* copy : copies_) copy->fresh_ = false;
}

namespace {
thread_local int without_initialization = 0;
}  // namespace

WithoutInitialization::WithoutInitialization() { ++without_initialization; }
WithoutInitialization::~WithoutInitialization() { --without_initialization; }

void begin_table(at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  if (without_initialization > 0) return;
  weight.normal_(0.0, 1.0 / std::sqrt(static_cast<double>(weight.size(1))));
}

at::Tensor scores(const at::Tensor& x, const LabelWeights& labels) {
  ops::LinearOptions options;
  options.weight_copy = labels.copy;
  return ops::linear(x, labels.weight, std::nullopt, options);
}

Linear::Linear(int64_t in, int64_t out, bool with_bias, int64_t parts) {
  weight = at::empty({out, in});
  const double limit = std::sqrt(6.0 / static_cast<double>(in + out / parts));
  if (without_initialization == 0) weight.uniform_(-limit, limit);
  weight = register_parameter("weight", weight);
  if (with_bias) bias = register_parameter("bias", at::zeros({out}));
}

at::Tensor Linear::forward(const at::Tensor& x) {
  const auto with_bias = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  ops::LinearOptions options;
  options.weight_copy = weight_copy_.find(weight, x.scalar_type());
  if (with_bias) options.bias_copy = bias_copy_.find(bias, x.scalar_type());
  return ops::linear(x, weight, with_bias, options);
}

at::Tensor Linear::relu_forward(const at::Tensor& x, double dropout) {
  ops::LinearOptions options{weight_copy_.find(weight, x.scalar_type()),
                             bias_copy_.find(bias, x.scalar_type()), /*relu=*/true, dropout};
  return ops::linear(x, weight, bias, options);
}

LabelWeights Linear::labels(const at::Tensor& x) {
  return {weight, weight_copy_.find(weight, x.scalar_type())};
}

std::vector<ParameterCopy*> Linear::copies() { return {&weight_copy_, &bias_copy_}; }

at::Tensor Residual::settled() const {
  return part.defined() ? ops::residual(sum, part, dropout) : sum;
}

LayerNorm::LayerNorm(int64_t width) {
  weight = register_parameter("weight", at::ones({width}));
  bias = register_parameter("bias", at::zeros({width}));
}

at::Tensor LayerNorm::forward(const at::Tensor& x, const Context& context) {
  Residual alone{x};
  return forward(alone, context);
}

at::Tensor LayerNorm::forward(Residual& x, const Context& context) {
  constexpr double kEpsilon = 1e-6;
  const ops::NormOptions options{kEpsilon, x.dropout,
                                 context.compute.value_or(weight.scalar_type())};
  auto [sum, normed] = x.part.defined() ? ops::add_norm(x.sum, x.part, weight, bias, options)
                                        : ops::carry_norm(x.sum, weight, bias, options);
  x = {sum};
  return normed;
}

FeedForward::FeedForward(int64_t width, int64_t inner, double dropout) : dropout_(dropout) {
  in_ = register_module("in", std::make_shared<Linear>(width, inner, true));
  out_ = register_module("out", std::make_shared<Linear>(inner, width, true));
}

at::Tensor FeedForward::forward(const at::Tensor& x) {
  return out_->forward(in_->relu_forward(x, is_training() ? dropout_ : 0.0));
}

Embedding::Embedding(int64_t vocab, int64_t width, int64_t longest) : longest_(longest) {
  weight = at::empty({vocab, width});
  begin_table(weight);
  weight = register_parameter("weight", weight);
}

at::Tensor Embedding::positions(int64_t length, const at::TensorOptions& options) {
  const int64_t width = weight.size(1), half = width / 2;
  // Sums of parts stay in float32, whatever type the vectors are kept in.
  const at::ScalarType type = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (tables_.empty() || tables_.back().size(0) < length ||
      tables_.back().device() != weight.device() || tables_.back().scalar_type() != type) {
    const int64_t rows = std::max(length, longest_);
    const auto wide = options.dtype(at::kDouble);
    const double step = std::log(10000.0) / static_cast<double>(std::max<int64_t>(half - 1, 1));
    const at::Tensor angles =
        at::arange(rows, wide).unsqueeze(1) * (at::arange(half, wide) * -step).exp().unsqueeze(0);
    at::Tensor table = at::cat({angles.sin(), angles.cos()}, 1);
    if (width % 2 == 1) table = at::cat({table, at::zeros({rows, 1}, wide)}, 1);
    tables_.push_back(table.to(type));
  }
  return tables_.back().slice(0, 0, length);
}

double Embedding::scale() const { return std::sqrt(static_cast<double>(weight.size(1))); }

at::Tensor Embedding::forward(const at::Tensor& ids) { return with_table(ids, weight).vectors; }

Embedding::Tokens Embedding::with_table(const at::Tensor& ids, const at::Tensor& table) {
  const at::Tensor places = positions(ids.size(1), weight.options());
  const ops::Embedded embedded = ops::embed(table, ids, places, scale());
  return {embedded.tokens, embedded.table};
}

at::Tensor Embedding::forward_at(const at::Tensor& ids, const at::Tensor& places, int64_t end) {
  const at::Tensor all = positions(end, weight.options());
  return at::add(at::embedding(all, places), at::embedding(weight, ids), scale());
}

LabelWeights Embedding::labels(const at::Tensor& x, const at::Tensor& table) {
  return {table, weight_copy_.find(weight, x.scalar_type())};
}

std::vector<ParameterCopy*> Embedding::copies() { return {&weight_copy_}; }

namespace {

using Body = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

struct HeldFunction : torch::CustomClassHolder {
  explicit HeldFunction(Body body) : f(std::move(body)) {}
  Body f;
};

class Recompute : public torch::autograd::Function<Recompute> {
 public:
  // A TensorList: autograd does not look into a std::vector for inputs.
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::TensorList tensors,
                            const Body& f) {
    const std::vector<at::Tensor> inputs = tensors.vec();
    ctx->saved_data["f"] = c10::IValue::make_capsule(c10::make_intrusive<HeldFunction>(f));
    ctx->saved_data["random"] = generator_of(inputs).get_state();
    ctx->save_for_backward(inputs);
    const at::NoGradGuard no_grad;
    return f(inputs);
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& saved : ctx->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
    }
    at::Generator generator = generator_of(inputs);
    const at::Tensor now = generator.get_state();
    generator.set_state(ctx->saved_data["random"].toTensor());
    {
      const at::AutoGradMode grad_mode(true);
      const auto held = ctx->saved_data["f"].toCapsule();
      const at::Tensor result = static_cast<HeldFunction*>(held.get())->f(inputs);
      generator.set_state(now);
      torch::autograd::backward({result}, {grads[0]});
    }
    std::vector<at::Tensor> result;
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    result.emplace_back();  // the function has no gradient
    return result;
  }

 private:
  static at::Generator generator_of(const std::vector<at::Tensor>& inputs) {
    return at::globalContext().defaultGenerator(inputs.at(0).device());
  }
};

}  // namespace

at::Tensor checkpoint(const Body& f, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return f(inputs);
  return Recompute::apply(at::TensorList(inputs), f);
}

}  // namespace sinkhorn::nn
