#include "sinkhorn/nn/transformer_layer.h"

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

Residual TransformerLayer::advance(Residual x, const Context& context, const Memory* memory) {
  LayerAttention modules;
  modules.self = [&](const at::Tensor& normed) { return attention_->forward(normed, context); };
  modules.cross = [&](const at::Tensor& query) {
    return cross_->forward(query, memory->states.to(query.scalar_type()), memory->mask);
  };
  return advance(std::move(x), context, modules);
}

Residual TransformerLayer::advance(Residual x, const Context& context,
                                   const LayerAttention& attention) {
  const double dropout = is_training() ? dropout_ : 0.0;
  const at::Tensor normed = attention_norm_->forward(x, context);
  x = {x.sum, attention.self(normed), dropout};
  if (cross_ != nullptr) {
    const at::Tensor query = cross_norm_->forward(x, context);
    x = {x.sum, attention.cross(query), dropout};
  }
  const at::Tensor inner = ff_norm_->forward(x, context);
  return {x.sum, ff_->forward(inner), dropout};
}

at::Tensor TransformerLayer::forward(const at::Tensor& x, const Context& context,
                                     const Memory* memory) {
  return advance({x}, context, memory).settled();
}

Stack::Stack(const LayerConfig& config, int64_t layers, bool checkpoint) : checkpoint_(checkpoint) {
  for (int64_t i = 0; i < layers; ++i) {
    layers_.push_back(
        register_module(std::to_string(i), std::make_shared<TransformerLayer>(config)));
  }
  norm_ = register_module("norm", std::make_shared<LayerNorm>(config.place.width));
}

at::Tensor Stack::forward(at::Tensor input, const Context& context, const Memory* memory) {
  Residual x{std::move(input)};
  for (const auto& layer : layers_) {
    if (!checkpoint_ || !is_training()) {
      x = layer->advance(x, context, memory);
      continue;
    }
    std::vector<at::Tensor> inputs{x.sum};
    if (memory != nullptr) inputs.push_back(memory->states);
    const std::optional<at::Tensor> memory_mask = memory == nullptr ? std::nullopt : memory->mask;
    x = {checkpoint(
        [layer, context, memory_mask](const std::vector<at::Tensor>& in) {
          if (in.size() == 1) return layer->forward(in[0], context);
          const Memory again{in[1], memory_mask};
          return layer->forward(in[0], context, &again);
        },
        inputs)};
  }
  return norm_->forward(x, context);
}

at::Tensor Stack::forward(at::Tensor input, const Context& context,
                          const std::vector<LayerAttention>& attentions) {
  Residual x{std::move(input)};
  for (size_t i = 0; i < layers_.size(); ++i) x = layers_[i]->advance(x, context, attentions[i]);
  return norm_->forward(x, context);
}

}  // namespace sinkhorn::nn
