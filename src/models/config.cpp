#include "sinkhorn/models/config.h"

#include "sinkhorn/error.h"
#include "sinkhorn/models/models.h"

namespace sinkhorn::models {
namespace {

void check_share(const char* name, double value) {
  if (value >= 0 && value < 1) return;
  throw UsageError("model: " + std::string(name) + " must lie in [0, 1)");
}

void check_positive(const char* name, int64_t value) {
  if (value >= 1) return;
  throw UsageError("model: " + std::string(name) + " is " + std::to_string(value) +
                   "; it must be at least 1");
}

}  // namespace

ModelConfig model_size(std::string_view name) {
  ModelConfig c;
  if (name == "tiny") return c;
  c.layers = 6;
  c.width = 512;
  c.ff_width = 2048;
  c.heads = 8;
  c.label_smoothing = 0.1;
  if (name == "base") return c;
  c.label_smoothing = 0.0;
  c.tied = false;
  c.max_length = 256;
  if (name == "lm_base") return c;
  c.width = 2048;
  c.ff_width = 8192;
  if (name == "lm_big") return c;
  throw UsageError("model: size is '" + std::string(name) +
                   "'; it must be one of tiny, base, lm_base, lm_big");
}

void check_model(const ModelConfig& c) {
  check_positive("layers", c.layers);
  check_positive("width", c.width);
  check_positive("ff_width", c.ff_width);
  check_positive("heads", c.heads);
  check_positive("max_length", c.max_length);
  check_positive("vocab", c.vocab);
  if (c.width % c.heads != 0) {
    throw UsageError("model: width " + std::to_string(c.width) + " is not a multiple of heads " +
                     std::to_string(c.heads));
  }
  check_share("dropout", c.dropout);
  check_share("attention_dropout", c.attention_dropout);
  check_share("relu_dropout", c.relu_dropout);
  check_share("label_smoothing", c.label_smoothing);
}

}  // namespace sinkhorn::models
