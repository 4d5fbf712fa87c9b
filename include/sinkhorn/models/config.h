// The size and shape of a model, and the named sizes of the paper.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sinkhorn/nn/attention_config.h"

namespace sinkhorn::models {

struct ModelConfig {
  int64_t layers = 2;
  int64_t width = 128;     // d
  int64_t ff_width = 512;  // inside the feed-forward part
  int64_t heads = 4;
  double dropout = 0.1;            // after each part, before the residual sum, and on embeddings
  double attention_dropout = 0.1;  // on attention weights
  double relu_dropout = 0.1;       // inside the feed-forward part
  double label_smoothing = 0.0;
  bool tied = true;           // output and embedding share their weights
  bool checkpoint = false;    // recompute each layer in backward instead of keeping it
  int64_t max_length = 1024;  // positions of the longest sequence

  // Filled in from the task.
  int64_t vocab = 0;
  int64_t classes = 0;

  nn::AttentionConfig encoder;  // Seq2Seq, Classifier
  nn::AttentionConfig decoder;  // LanguageModel, Seq2Seq
};

// "tiny", "base", "lm_base" or "lm_big"; throws UsageError for another name.
ModelConfig model_size(std::string_view name);

}  // namespace sinkhorn::models
