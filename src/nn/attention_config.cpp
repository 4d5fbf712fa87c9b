#include "sinkhorn/nn/attention_config.h"

#include <algorithm>
#include <initializer_list>

#include "sinkhorn/error.h"

namespace sinkhorn::nn {
namespace {

[[noreturn]] void refuse(const std::string& reason) { throw UsageError("attention: " + reason); }

void check_word(const char* option, const std::string& word,
                std::initializer_list<const char*> known) {
  if (std::find(known.begin(), known.end(), word) != known.end()) return;
  std::string list;
  for (const char* k : known) list += (list.empty() ? "" : ", ") + std::string(k);
  refuse(std::string(option) + " is '" + word + "'; it must be one of " + list);
}

void check_range(const char* option, int64_t value, int64_t least) {
  constexpr int64_t kMost = int64_t{1} << 24;  // above any sequence, below where sizes overflow
  if (value >= least && value <= kMost) return;
  refuse(std::string(option) + " is " + std::to_string(value) + "; it must be at " +
         (value < least ? "least " + std::to_string(least) : "most " + std::to_string(kMost)));
}

void check_numbers(const AttentionConfig& c) {
  check_range("block", c.block, 1);
  check_range("max_blocks", c.max_blocks, 0);
  check_range("window", c.window, 0);
  check_range("iterations", c.iterations, 0);
  check_range("budget", c.budget, 1);
  check_range("stride", c.stride, 1);
  check_range("summary", c.summary, 1);
  if (!(c.temperature > 0)) refuse("temperature must be greater than 0");
  if (c.kind == "sparse" && c.summary > c.stride) {
    refuse("summary (" + std::to_string(c.summary) + ") cannot exceed stride (" +
           std::to_string(c.stride) + ")");
  }
}

void check_decoder(const AttentionConfig& c) {
  if (c.kind == "sortcut") {
    refuse(
        "sortcut cannot be used in a decoder: every query reads the same few sorted blocks of "
        "the whole sequence, so each new token would need all of it computed again");
  }
  if (c.causal == "inclusive" && c.window > 0) {
    refuse(
        "causal 'inclusive' sorts the own block in and needs window 0; set it, or use causal "
        "'strict'");
  }
  if (c.combine == "logits" && c.causal == "strict") {
    refuse(
        "combine 'logits' adds a query's own block to the sorted one and needs causal "
        "'inclusive'; the first blocks of 'strict' have no sorted one");
  }
}

void check_encoder(const AttentionConfig& c) {
  if (c.pooling == "recent") refuse("pooling 'recent' looks back and is for decoders only");
  if (c.columns == "prefix" || c.columns == "prior") {
    refuse("columns '" + c.columns +
           "' is causal and for decoders only; encoders take 'full' or 'none'");
  }
}

}  // namespace

AttentionConfig resolve_attention(AttentionConfig c, bool decoder) {
  if (c.columns == "auto") c.columns = decoder ? "prefix" : "full";
  if (c.kind == "window") c.window = std::max<int64_t>(1, c.window);
  return c;
}

AttentionConfig attention_preset(std::string_view name, bool decoder, bool classifies) {
  AttentionConfig c = resolve_attention({}, decoder);
  if (name == "prefix") return c;
  if (name == "default" || name == "windowed") {
    c.window = classifies ? 0 : 1;
    c.sort_net = "bilinear";
    c.columns = decoder ? "prior" : "none";
    if (decoder) c.pooling = "recent";
    c.gumbel = classifies || name == "windowed";
    return c;
  }
  if (name == "paper") {
    c.pooling = "sum";
    c.causal = "inclusive";
    c.combine = "logits";
    return c;
  }
  throw UsageError("attention: preset is '" + std::string(name) +
                   "'; it must be one of default, windowed, prefix, paper");
}

bool sorts(const AttentionConfig& c) {
  return c.kind == "sinkhorn" || c.kind == "mixture" || c.kind == "sortcut";
}

bool leaks_future(const AttentionConfig& c) {
  return sorts(c) && c.columns == "full" && c.iterations > 0;
}

void check_attention(const AttentionConfig& c, bool decoder) {
  check_word("kind", c.kind,
             {"sinkhorn", "mixture", "sortcut", "full", "local", "window", "sparse"});
  check_word("sort_net", c.sort_net, {"linear", "linear_relu", "mlp", "mlp_relu", "bilinear"});
  check_word("pooling", c.pooling, {"mean", "sum", "recent"});
  check_word("causal", c.causal, {"strict", "inclusive"});
  check_word("columns", c.columns, {"auto", "full", "prefix", "prior", "none"});
  check_word("combine", c.combine, {"concat", "logits", "outputs"});
  check_numbers(c);
  if (!sorts(c)) return;
  if (c.combine == "logits" && c.window > 0) {
    refuse("combine 'logits' adds block to block and needs window 0");
  }
  decoder ? check_decoder(c) : check_encoder(c);
}

}  // namespace sinkhorn::nn
