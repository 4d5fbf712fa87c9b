// Multi-head self-attention of every kind on one interface: Sinkhorn, its mixture with full
// attention, SortCut, and the baselines full, local, window and sparse.
#pragma once

#include <utility>

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

// Proposes where blocks should go: x [B, L, E] -> logits [B, H, N, N], float32 (float64 for
// float64).
class SortNet : public torch::nn::Module {
 public:
  SortNet(const AttentionConfig& config, const AttentionPlace& place);
  // noisy: with standard Gumbel noise, drawn from the default generator.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& mask,
                     bool noisy = false);

  // What forward is made of. Whatever else reads x reads the one that is returned here: the
  // gradients of all three then meet in one pass.
  struct Blocks {
    at::Tensor x;                      // as it was given
    at::Tensor destinations, sources;  // [B, N, E]; sources for `bilinear` alone
  };
  Blocks blocks(const at::Tensor& x, const std::optional<at::Tensor>& mask) const;
  at::Tensor logits(const Blocks& blocks, bool noisy = false);

  // The same row by row, for decoders. pooled [B, R, E] describes R destinations, in the type of
  // the logits; sources, for `bilinear` alone, are [B, H, N, D]. [B, H, R, N], or as many columns
  // as the network has.
  at::Tensor rows(const at::Tensor& pooled, const at::Tensor& sources);
  // bilinear: the projected sources of pooled ones [B, N, E], [B, H, N, D]; what rows multiplies
  // with them, [B, H, R, D].
  at::Tensor project_sources(const at::Tensor& pooled);
  at::Tensor project_destinations(const at::Tensor& pooled);
  // Whether a source is described by its own tokens alone, rather than as a destination is.
  bool own_sources() const { return place_.decoder && config_.causal == "strict"; }
  bool bilinear() const { return destination_ != nullptr; }
  int64_t max_blocks() const { return max_blocks_; }  // columns; bilinear has no such limit

 private:
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

  // What forward is made of, for a decoder that keeps keys and values: x -> heads -> result.
  struct Heads {
    at::Tensor query, key, value;  // [B, H, L, D]; with tie_kv value is key
  };
  Heads project(const at::Tensor& x);
  at::Tensor attend(const Heads& heads, const std::optional<at::Tensor>& sort,
                    const std::optional<at::Tensor>& mask);
  at::Tensor output(const at::Tensor& attended);  // [B, H, L, D] -> [B, L, E]
  at::Tensor balanced(const at::Tensor& logits, const std::optional<at::Tensor>& mask);

  const AttentionConfig& config() const { return config_; }
  const AttentionPlace& place() const { return place_; }
  const std::shared_ptr<SortNet>& sort_net() const { return sort_net_; }
  bool sorts() const { return sort_net_ != nullptr; }

 private:
  at::Tensor sparse(const Heads& heads, const std::optional<at::Tensor>& mask);
  double dropout() const { return is_training() ? place_.dropout : 0.0; }
  bool noisy() const { return config_.gumbel && is_training(); }
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

  // Its parts, for a decoder that reads the memory once: [B, S, E] -> keys and values, [B, H, S,
  // D]; x -> queries; what they found -> [B, L, E].
  std::pair<at::Tensor, at::Tensor> read(const at::Tensor& memory);
  at::Tensor queries(const at::Tensor& x);
  at::Tensor output(const at::Tensor& attended);
  const AttentionPlace& place() const { return place_; }

 private:
  AttentionPlace place_;
  std::shared_ptr<Linear> query_, key_value_, out_;
};

}  // namespace sinkhorn::nn
