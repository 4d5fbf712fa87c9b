// Multi-head self-attention of every kind on one interface: Sinkhorn, its mixture with full
// attention, SortCut, and the baselines full, local, window and sparse.
#pragma once

#include "sinkhorn/nn/attention_config.h"
#include "sinkhorn/nn/layers.h"

namespace sinkhorn::nn {

// Where the module stands in a model.
struct AttentionPlace {
  int64_t width = 0;       // E
  int64_t heads = 1;       // H; E / H is the head width D
  int64_t max_length = 0;  // of the model, for sort networks with a column for every block
  bool decoder = false;    // causal
  double dropout = 0.0;    // on attention weights
};

// Proposes where blocks should go: x [B, L, E] -> logits [B, H, N, N], float32.
class SortNet : public torch::nn::Module {
 public:
  SortNet(const AttentionConfig& config, const AttentionPlace& place);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& mask);

 private:
  at::Tensor bilinear(const at::Tensor& pooled, const at::Tensor& x,
                      const std::optional<at::Tensor>& mask);

  AttentionConfig config_;
  AttentionPlace place_;
  int64_t max_blocks_;
  std::shared_ptr<Linear> first_, second_;        // linear and mlp
  std::shared_ptr<Linear> destination_, source_;  // bilinear
};

class SinkhornAttention : public torch::nn::Module {
 public:
  // Throws UsageError for options that do not go together.
  SinkhornAttention(const AttentionConfig& config, const AttentionPlace& place);

  at::Tensor forward(const at::Tensor& x, const Context& context);  // [B, L, E] -> [B, L, E]

  // The relaxed permutation of x [B, L, E]: [B, H, N, N], float32.
  at::Tensor sort(const at::Tensor& x, const std::optional<at::Tensor>& mask);

  const AttentionConfig& config() const { return config_; }
  bool sorts() const { return sort_net_ != nullptr; }

 private:
  struct Heads {
    at::Tensor query, key, value;  // [B, H, L, D]
  };
  Heads project(const at::Tensor& x);
  at::Tensor attend(const Heads& heads, const std::optional<at::Tensor>& sort,
                    const std::optional<at::Tensor>& mask);
  at::Tensor sparse(const Heads& heads, const std::optional<at::Tensor>& mask);
  double dropout() const { return is_training() ? place_.dropout : 0.0; }
  std::string causal() const { return place_.decoder ? config_.causal : "none"; }

  AttentionConfig config_;
  AttentionPlace place_;
  std::shared_ptr<Linear> qkv_, out_;
  std::shared_ptr<SortNet> sort_net_;
};

// Full attention from one sequence to another (a decoder's second part).
class CrossAttention : public torch::nn::Module {
 public:
  explicit CrossAttention(const AttentionPlace& place);
  // x [B, L, E], memory [B, S, E], of which memory_mask [B, S] says what is real.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& memory,
                     const std::optional<at::Tensor>& memory_mask);

 private:
  AttentionPlace place_;
  std::shared_ptr<Linear> query_, key_value_, out_;
};

}  // namespace sinkhorn::nn
