#include "sinkhorn/nn/transformer_layer.h"

#include <ATen/ops/dropout.h>

namespace sinkhorn::nn {

TransformerLayer::TransformerLayer(const LayerConfig& c) : dropout_(c.dropout) {
  const int64_t width = c.place.width;
  const auto norm = [&](const char* name) {
    return register_module(name, std::make_shared<LayerNorm>(width));
  };
  attention_norm_ = norm("attention_norm");
  attention_ =
      register_module("attention", std::make_shared<SinkhornAttention>(c.attention, c.place));
  if (c.cross) {
    cross_norm_ = norm("cross_norm");
    cross_ = register_module("cross", std::make_shared<CrossAttention>(c.place));
  }
  ff_norm_ = norm("ff_norm");
  ff_ = register_module("ff", std::make_shared<FeedForward>(width, c.ff_width, c.relu_dropout));
}

at::Tensor TransformerLayer::residual(const at::Tensor& x, const at::Tensor& part) const {
  return x + at::dropout(part, dropout_, is_training());
}

at::Tensor TransformerLayer::forward(const at::Tensor& input, const Context& context,
                                     const Memory* memory) {
  at::Tensor x =
      residual(input, attention_->forward(attention_norm_->forward(input, context), context));
  if (cross_ != nullptr) {
    const at::Tensor normed = cross_norm_->forward(x, context);
    x = residual(x, cross_->forward(normed, memory->states.to(normed.scalar_type()), memory->mask));
  }
  return residual(x, ff_->forward(ff_norm_->forward(x, context)));
}

Stack::Stack(const LayerConfig& config, int64_t layers, bool checkpoint) : checkpoint_(checkpoint) {
  for (int64_t i = 0; i < layers; ++i) {
    layers_.push_back(
        register_module(std::to_string(i), std::make_shared<TransformerLayer>(config)));
  }
  norm_ = register_module("norm", std::make_shared<LayerNorm>(config.place.width));
}

at::Tensor Stack::forward(at::Tensor x, const Context& context, const Memory* memory) {
  for (const auto& layer : layers_) {
    if (!checkpoint_ || !is_training()) {
      x = layer->forward(x, context, memory);
      continue;
    }
    std::vector<at::Tensor> inputs{x};
    if (memory != nullptr) inputs.push_back(memory->states);
    const std::optional<at::Tensor> memory_mask = memory == nullptr ? std::nullopt : memory->mask;
    x = checkpoint(
        [layer, context, memory_mask](const std::vector<at::Tensor>& in) {
          if (in.size() == 1) return layer->forward(in[0], context);
          const Memory again{in[1], memory_mask};
          return layer->forward(in[0], context, &again);
        },
        inputs);
  }
  return norm_->forward(x, context);
}

}  // namespace sinkhorn::nn
