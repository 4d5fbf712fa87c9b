// One pre-norm layer: x + dropout(part(norm(x))) for self-attention, in decoders of a Seq2Seq
// attention to the encoder, and the feed-forward part.
#pragma once

#include <functional>

#include "sinkhorn/nn/attention.h"

namespace sinkhorn::nn {

struct LayerConfig {
  AttentionConfig attention;
  AttentionPlace place;
  int64_t ff_width = 0;
  double dropout = 0.0;       // of each part's result
  double relu_dropout = 0.0;  // inside the feed-forward part
  bool cross = false;         // attends to an encoder's output
};

// What a decoder layer reads beside its own sequence.
struct Memory {
  at::Tensor states;                 // [B, S, E]
  std::optional<at::Tensor> mask{};  // [B, S] bool
};

// Does a layer's attention in its modules' place, as a decoder does that keeps what it has read.
struct LayerAttention {
  std::function<at::Tensor(const at::Tensor&)> self;   // normed [B, L, E] -> [B, L, E]
  std::function<at::Tensor(const at::Tensor&)> cross;  // the same, to the encoder's output
};

class TransformerLayer : public torch::nn::Module {
 public:
  explicit TransformerLayer(const LayerConfig& config);
  at::Tensor forward(const at::Tensor& x, const Context& context, const Memory* memory = nullptr);
  // The same on a stream that goes on behind the layer: the last part stays to be added.
  Residual advance(Residual x, const Context& context, const Memory* memory = nullptr);
  Residual advance(Residual x, const Context& context, const LayerAttention& attention);

  const std::shared_ptr<SinkhornAttention>& attention() const { return attention_; }
  const std::shared_ptr<CrossAttention>& cross() const { return cross_; }  // null: none

 private:
  double dropout_;
  std::shared_ptr<LayerNorm> attention_norm_, cross_norm_, ff_norm_;
  std::shared_ptr<SinkhornAttention> attention_;
  std::shared_ptr<CrossAttention> cross_;
  std::shared_ptr<FeedForward> ff_;
};

// Layers and the final norm.
class Stack : public torch::nn::Module {
 public:
  Stack(const LayerConfig& config, int64_t layers, bool checkpoint);
  at::Tensor forward(at::Tensor x, const Context& context, const Memory* memory = nullptr);
  // With an attention for each layer, in evaluation.
  at::Tensor forward(at::Tensor x, const Context& context,
                     const std::vector<LayerAttention>& attentions);

  const std::vector<std::shared_ptr<TransformerLayer>>& layers() const { return layers_; }

 private:
  bool checkpoint_;
  std::vector<std::shared_ptr<TransformerLayer>> layers_;
  std::shared_ptr<LayerNorm> norm_;
};

}  // namespace sinkhorn::nn
