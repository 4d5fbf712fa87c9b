#include "cli/fields.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <type_traits>

#include "sinkhorn/error.h"
#include "tasks/files.h"

namespace sinkhorn::cli {

std::string join(const std::vector<std::string>& words, const std::string& separator) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : separator) + word;
  return all;
}

std::string choice_of(const std::vector<std::string>& words) {
  std::string all = "{";
  return all.append(join(words, ",")).append("}");
}

namespace {

const Range kCount = {"at least 0", [](double x) { return x >= 0; }};
const Range kThreads = {"0 to 1024", [](double x) { return x >= 0 && x <= 1024; }};
const Range kPositiveCount = {"at least 1", [](double x) { return x >= 1; }};
const Range kMillion = {"1 to 1048576", [](double x) { return x >= 1 && x <= 1048576; }};
const Range kTokens = {"0 to 1073741824", [](double x) { return x >= 0 && x <= 1073741824; }};
// Each layer takes a moment to make, whatever its size: a slip of the hand would take hours.
const Range kLayers = {"1 to 1000", [](double x) { return x >= 1 && x <= 1000; }};
const Range kPositive = {"more than 0", [](double x) { return x > 0; }};
const Range kRate = {"more than 0, at most 1e30", [](double x) { return x > 0 && x <= 1e30; }};
const Range kShare = {"0 to 1", [](double x) { return x >= 0 && x <= 1; }};
const Range kProbability = {"at least 0 and less than 1", [](double x) { return x >= 0 && x < 1; }};

// Configuration files hold any text but what ends a line, a quoted value, or begins a comment.
constexpr std::string_view kUnwritable = "\"\\#\n\r";

}  // namespace

bool is_writable(std::string_view text) { return text.find_first_of(kUnwritable) == text.npos; }

namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& text, const std::string& why) {
  // A message is one line, whatever it quotes.
  throw UsageError(name + ": \"" + text.substr(0, text.find('\n')) + "\" " + why);
}

template <typename T>
T parse_number(const Field& field, const std::string& text, const std::string& name) {
  T number{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const bool is_whole_type = std::is_integral_v<T>;
  if (error == std::errc::result_out_of_range) refuse(name, text, "is too large");
  if (error != std::errc() || stop != end || !std::isfinite(static_cast<double>(number))) {
    refuse(name, text, is_whole_type ? "is not a whole number" : "is not a number");
  }
  if (!field.range.holds(static_cast<double>(number))) {
    throw UsageError(name + ": " + text + " is out of range; expected " + field.range.words);
  }
  return number;
}

bool parse_bool(const std::string& text, const std::string& name) {
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  for (const char* word : {"true", "on", "yes", "1"}) {
    if (lower == word) return true;
  }
  for (const char* word : {"false", "off", "no", "0"}) {
    if (lower == word) return false;
  }
  refuse(name, text, "is neither true nor false");
}

std::string parse_text(const Field& field, const std::string& text, const std::string& name) {
  const std::vector<std::string>& words = field.words;
  if (!words.empty() && std::find(words.begin(), words.end(), text) == words.end()) {
    refuse(name, text, "is not one of " + join(words, ", "));
  }
  if (!is_writable(text)) {
    refuse(name, text,
           "holds a quote, a backslash, a # or a line break, which configurations cannot");
  }
  if (tasks::first_bad_byte(text))
    refuse(name, text, "is not UTF-8, which configurations and checkpoints are");
  return text;
}

Fields task_fields(tasks::TaskConfig& task) {
  return {
      {"task.name", &task.name, "what to learn", tasks::task_names()},
      {"task.data", &task.data,
       "folder or file of the data, as its publisher lays it out; required but by sort and recall"},
      {"task.cache", &task.cache,
       "folder for token files and vocabularies; empty: the user's cache"},
      {"task.tokens",
       &task.tokens,
       "what a token is; auto: as in the paper",
       {"auto", "bytes", "pieces"}},
      {"task.tokenizer", &task.tokenizer, "SentencePiece model; empty: train one on the data"},
      {"task.vocab", &task.vocab, "pieces to train; 0: the task's own", {}, kCount},
      {"task.length", &task.length, "longest sequence in tokens; 0: the task's own", {}, kTokens},
      {"task.valid", &task.valid,
       "train: hold validation out of training where it would be the test; empty: let it be"},
      {"task.files", &task.files,
       "text: joined: a folder's files as one text, in the order of their names; empty: one by "
       "one"},
      {"task.sort_symbols", &task.sort_symbols, "sort: different symbols", {}, kPositiveCount},
      {"task.sort_train_max",
       &task.sort_train_max,
       "sort: longest list in training",
       {},
       kPositiveCount},
      {"task.sort_test_max",
       &task.sort_test_max,
       "sort: longest list in the test",
       {},
       kPositiveCount},
      {"task.sort_train_size",
       &task.sort_train_size,
       "sort: lists to train on",
       {},
       kPositiveCount},
      {"task.sort_test_size", &task.sort_test_size, "sort: lists in the test", {}, kPositiveCount},
      {"task.recall_pairs",
       &task.recall_pairs,
       "recall: key-value pairs a sequence",
       {},
       kPositiveCount},
      {"task.recall_queries", &task.recall_queries, "recall: keys asked; 0: all", {}, kCount},
      {"task.recall_distance",
       &task.recall_distance,
       "recall: fewest tokens from a pair to a query; 0: half of the length",
       {},
       kCount},
      {"task.recall_keys", &task.recall_keys, "recall: different keys", {}, kPositiveCount},
      {"task.recall_values", &task.recall_values, "recall: different values", {}, kPositiveCount},
      {"task.recall_fillers",
       &task.recall_fillers,
       "recall: different tokens between pairs",
       {},
       kPositiveCount},
      {"task.recall_test_size",
       &task.recall_test_size,
       "recall: sequences in the test",
       {},
       kPositiveCount},
  };
}

Fields model_fields(models::ModelConfig& model) {
  return {
      {"model.layers", &model.layers, "layers a stack", {}, kLayers},
      {"model.width", &model.width, "features of a token", {}, kMillion},
      {"model.ff_width", &model.ff_width, "features inside the feed-forward part", {}, kMillion},
      {"model.heads", &model.heads, "attention heads; they share the width evenly", {}, kMillion},
      {"model.dropout", &model.dropout, "after each part and on embeddings", {}, kProbability},
      {"model.attention_dropout",
       &model.attention_dropout,
       "on attention weights",
       {},
       kProbability},
      {"model.relu_dropout", &model.relu_dropout, "inside the feed-forward part", {}, kProbability},
      {"model.label_smoothing",
       &model.label_smoothing,
       "share spread over all labels",
       {},
       kProbability},
      {"model.tied", &model.tied, "output and embedding share their weights"},
      {"model.checkpoint", &model.checkpoint, "recompute each layer in backward, to save memory"},
      {"model.max_length",
       &model.max_length,
       "longest sequence in tokens; 0: from the task",
       {},
       kTokens},
  };
}

Fields optimizer_fields(train::OptimizerConfig& optimizer) {
  return {
      {"optimizer.name",
       &optimizer.name,
       "how gradients become steps",
       {"adamw", "adam", "adafactor"}},
      {"optimizer.rate", &optimizer.rate, "peak learning rate; noam, rsqrt: a factor", {}, kRate},
      {"optimizer.beta1", &optimizer.beta1, "decay of the mean gradient", {}, kProbability},
      {"optimizer.beta2", &optimizer.beta2, "decay of the mean square", {}, kProbability},
      {"optimizer.epsilon", &optimizer.epsilon, "added to the root mean square", {}, kCount},
      {"optimizer.weight_decay", &optimizer.weight_decay, "of matrices, by adamw", {}, kCount},
      {"optimizer.schedule",
       &optimizer.schedule,
       "the learning rate after the warm-up",
       {"constant", "linear", "cosine", "noam", "rsqrt"}},
      {"optimizer.warmup", &optimizer.warmup, "steps of warm-up", {}, kCount},
      {"optimizer.final_rate",
       &optimizer.final_rate,
       "cosine, linear: the last step's share of the peak",
       {},
       kShare},
      {"optimizer.clip", &optimizer.clip, "largest gradient norm; 0: no clipping", {}, kCount},
  };
}

Fields train_fields(train::TrainConfig& train) {
  return {
      {"train.run", &train.run, "folder of the run; empty: runs/ and the configuration's name"},
      {"train.init", &train.init,
       "a run, an export or a checkpoint whose parameters training begins with; empty: random "
       "ones"},
      {"train.device", &train.device, "auto, cpu, cuda or cuda:N; auto: a GPU where there is one"},
      {"train.precision",
       &train.precision,
       "of the arithmetic; weights stay float32 under bf16; fp16: not in training",
       {"float32", "bf16", "fp16", "float64"}},
      {"train.threads", &train.threads, "CPU threads; 0: all cores", {}, kThreads},
      {"train.steps", &train.steps, "steps in all", {}, kCount},
      {"train.batch", &train.batch, "sequences a batch", {}, kMillion},
      {"train.batch_tokens",
       &train.batch_tokens,
       "tokens a batch, in place of train.batch; 0: off",
       {},
       kTokens},
      {"train.accumulate", &train.accumulate, "batches a step", {}, kMillion},
      {"train.seed", &train.seed, "of weights, data order and dropout"},
      {"train.log_every", &train.log_every, "steps between log lines", {}, kPositiveCount},
      {"train.eval_every",
       &train.eval_every,
       "steps between evaluations; 0: only at the end",
       {},
       kCount},
      {"train.eval_batches",
       &train.eval_batches,
       "batches an evaluation; 0: the whole split",
       {},
       kCount},
      {"train.test_batches",
       &train.test_batches,
       "batches of the test at the end; 0: the whole split",
       {},
       kCount},
      {"train.save_every", &train.save_every, "steps between checkpoints", {}, kPositiveCount},
      {"train.keep", &train.keep, "newest checkpoints kept, beside the best", {}, kPositiveCount},
      {"train.graph", &train.graph, "capture steps in a CUDA graph where that is legal"},
      {"train.greedy", &train.greedy, "decode greedily in the last evaluation (sequence tasks)"},
  };
}

Fields attention_fields(const std::string& section, nn::AttentionConfig& attention) {
  const std::string s = section + ".";
  return {
      {s + "kind",
       &attention.kind,
       "how tokens attend",
       {"sinkhorn", "mixture", "sortcut", "full", "local", "window", "sparse"}},
      {s + "block", &attention.block, "tokens a block", {}, kPositiveCount},
      {s + "max_blocks",
       &attention.max_blocks,
       "columns of linear and mlp sort networks; 0: from the length",
       {},
       kCount},
      {s + "window", &attention.window, "blocks beside the own one in the local term", {}, kCount},
      {s + "sort_net",
       &attention.sort_net,
       "what scores the blocks",
       {"linear", "linear_relu", "mlp", "mlp_relu", "bilinear"}},
      {s + "pooling",
       &attention.pooling,
       "a block as one vector; recent: decoders only",
       {"mean", "sum", "recent"}},
      {s + "iterations", &attention.iterations, "balancing iterations", {}, kCount},
      {s + "temperature", &attention.temperature, "of the balancing", {}, kPositive},
      {s + "gumbel", &attention.gumbel, "Gumbel noise on the scores in training"},
      {s + "causal",
       &attention.causal,
       "which blocks a decoder may sort in",
       {"strict", "inclusive"}},
      {s + "columns",
       &attention.columns,
       "column sums; auto: prefix in decoders, full in encoders",
       {"auto", "full", "prefix", "prior", "none"}},
      {s + "combine",
       &attention.combine,
       "how sorted and local terms meet",
       {"concat", "logits", "outputs"}},
      {s + "budget",
       &attention.budget,
       "sortcut: sorted blocks that every query sees",
       {},
       kPositiveCount},
      {s + "stride", &attention.stride, "sparse: tokens a stride block", {}, kPositiveCount},
      {s + "summary",
       &attention.summary,
       "sparse: summary columns of a stride block",
       {},
       kPositiveCount},
      {s + "merged", &attention.merged, "sparse: every head sees both patterns"},
      {s + "tie_kv", &attention.tie_kv, "one projection serves keys and values"},
  };
}

}  // namespace

Fields choice_fields(Choices& choices) {
  const std::vector<std::string> presets = {"default", "windowed", "prefix", "paper"};
  const std::string preset_help =
      "a named combination, which the other keys override; none: default";
  return {
      {"model.size",
       &choices.size,
       "a size of the paper, whose numbers other model.* keys override; none: the defaults below",
       {"tiny", "base", "lm_base", "lm_big"}},
      {"encoder.preset", &choices.encoder_preset, preset_help, presets},
      {"decoder.preset", &choices.decoder_preset, preset_help, presets},
  };
}

Fields run_fields(train::RunConfig& config) {
  Fields all;
  for (Fields part : {task_fields(config.task), model_fields(config.model),
                      attention_fields("encoder", config.model.encoder),
                      attention_fields("decoder", config.model.decoder),
                      optimizer_fields(config.optimizer), train_fields(config.train)}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::string Field::type() const {
  if (std::holds_alternative<bool*>(value)) return "{true,false}";
  if (std::holds_alternative<double*>(value)) return "NUMBER";
  if (!std::holds_alternative<std::string*>(value)) return "INT";
  return words.empty() ? "TEXT" : choice_of(words);
}

std::string Field::get() const {
  return std::visit(
      [](const auto* variable) -> std::string {
        using T = std::remove_cvref_t<decltype(*variable)>;
        if constexpr (std::is_same_v<T, std::string>) {
          return *variable;
        } else if constexpr (std::is_same_v<T, bool>) {
          return *variable ? "true" : "false";
        } else {
          char digits[32];  // the shortest text that reads back to the same number
          return {digits, std::to_chars(digits, digits + sizeof(digits), *variable).ptr};
        }
      },
      value);
}

void Field::set(const std::string& text, const std::string& name) const {
  std::visit(
      [&](auto* variable) {
        using T = std::remove_reference_t<decltype(*variable)>;
        if constexpr (std::is_same_v<T, std::string>) {
          *variable = parse_text(*this, text, name);
        } else if constexpr (std::is_same_v<T, bool>) {
          *variable = parse_bool(text, name);
        } else {
          *variable = parse_number<T>(*this, text, name);
        }
      },
      value);
}

}  // namespace sinkhorn::cli
