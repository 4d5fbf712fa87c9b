// How one stack of layers attends: plain words and numbers, read from a configuration as they are.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sinkhorn::nn {

struct AttentionConfig {
  std::string kind = "sinkhorn";  // sinkhorn, mixture, sortcut, full, local, window, sparse
  int64_t block = 64;             // tokens a block
  int64_t max_blocks = 0;         // columns of the linear and mlp sort networks; 0: from max_length
  int64_t window = 0;             // blocks beside the own one in the local term
  std::string sort_net = "linear";  // linear, linear_relu, mlp, mlp_relu, bilinear
  std::string pooling = "mean";     // mean, sum; recent (decoders)
  int64_t iterations = 5;
  double temperature = 0.75;
  bool gumbel = true;             // Gumbel noise on the logits, in training only
  std::string causal = "strict";  // decoders: strict, inclusive
  std::string columns =
      "auto";  // auto: prefix in decoders, full in encoders; full, prefix, prior, none
  std::string combine = "concat";  // concat, logits, outputs
  int64_t budget = 2;              // sortcut: sorted blocks that every query sees
  int64_t stride = 64;             // sparse: tokens a stride block
  int64_t summary = 8;             // sparse: summary columns at the end of each stride block
  bool merged = false;             // sparse: every head sees both patterns
  bool tie_kv = false;             // one projection serves keys and values
};

// "default": the own block, the one before it (in encoders the one behind it, too) and one that a
// bilinear network routed there, without noise; rows are normalised, in decoders under prior
// columns. "windowed": the same with Gumbel noise. Encoders of classifiers, which must not learn
// their texts by heart, keep the noise and go without neighbours in both (docs/results.md says
// why). "prefix": the words above; "paper": its formulas literally. Throws UsageError for another
// name.
AttentionConfig attention_preset(std::string_view name, bool decoder, bool classifies = false);

// The words "auto" replaced by what they mean in that stack, and a window of one block at least
// where the kind is one.
AttentionConfig resolve_attention(AttentionConfig config, bool decoder);

bool sorts(const AttentionConfig& config);  // sinkhorn, mixture, sortcut
// Whether a decoder that attends so reads what comes later: column sums over all rows do.
bool leaks_future(const AttentionConfig& decoder);

// Throws UsageError, with the reason, for words that are unknown or do not go together.
void check_attention(const AttentionConfig& config, bool decoder);

}  // namespace sinkhorn::nn
