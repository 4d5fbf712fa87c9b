#include "sinkhorn/nn/layers.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cmath>

namespace sinkhorn::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, int64_t parts) {
  weight = at::empty({out, in});
  const double limit = std::sqrt(6.0 / static_cast<double>(in + out / parts));
  weight.uniform_(-limit, limit);
  weight = register_parameter("weight", weight);
  if (with_bias) bias = register_parameter("bias", at::zeros({out}));
}

at::Tensor Linear::forward(const at::Tensor& x) {
  const auto type = x.scalar_type();
  return at::linear(x, weight.to(type),
                    bias.defined() ? std::optional<at::Tensor>(bias.to(type)) : std::nullopt);
}

LayerNorm::LayerNorm(int64_t width) {
  weight = register_parameter("weight", at::ones({width}));
  bias = register_parameter("bias", at::zeros({width}));
}

at::Tensor LayerNorm::forward(const at::Tensor& x, const Context& context) {
  return at::layer_norm(x, weight.sizes(), weight, bias, 1e-6)
      .to(context.compute.value_or(weight.scalar_type()));
}

FeedForward::FeedForward(int64_t width, int64_t inner, double dropout) : dropout_(dropout) {
  in_ = register_module("in", std::make_shared<Linear>(width, inner, true));
  out_ = register_module("out", std::make_shared<Linear>(inner, width, true));
}

at::Tensor FeedForward::forward(const at::Tensor& x) {
  return out_->forward(at::dropout(at::relu(in_->forward(x)), dropout_, is_training()));
}

Embedding::Embedding(int64_t vocab, int64_t width, int64_t longest) : longest_(longest) {
  weight = at::empty({vocab, width}).normal_(0.0, 1.0 / std::sqrt(static_cast<double>(width)));
  weight = register_parameter("weight", weight);
}

at::Tensor Embedding::positions(int64_t length, const at::TensorOptions& options) {
  const int64_t width = weight.size(1), half = width / 2;
  if (tables_.empty() || tables_.back().size(0) < length ||
      tables_.back().device() != weight.device() ||
      tables_.back().scalar_type() != weight.scalar_type()) {
    const int64_t rows = std::max(length, longest_);
    const auto wide = options.dtype(at::kDouble);
    const double step = std::log(10000.0) / static_cast<double>(std::max<int64_t>(half - 1, 1));
    const at::Tensor angles =
        at::arange(rows, wide).unsqueeze(1) * (at::arange(half, wide) * -step).exp().unsqueeze(0);
    at::Tensor table = at::cat({angles.sin(), angles.cos()}, 1);
    if (width % 2 == 1) table = at::cat({table, at::zeros({rows, 1}, wide)}, 1);
    tables_.push_back(table.to(weight.scalar_type()));
  }
  return tables_.back().slice(0, 0, length);
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  const double scale = std::sqrt(static_cast<double>(weight.size(1)));
  return at::embedding(weight, ids) * scale + positions(ids.size(1), weight.options());
}

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
