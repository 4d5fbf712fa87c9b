// "Did you mean": the nearest of the words that would do, and the names that the same things have
// in other programs.
#include <algorithm>
#include <map>
#include <tuple>

#include "cli/config.h"
#include "tasks/metrics.h"

namespace sinkhorn::cli {
namespace {

// What nanoGPT, fairseq and Hugging Face's trainer call a key, with _ for -.
const std::map<std::string, std::string>& familiar_names() {
  static const std::map<std::string, std::string> kNames = {
      {"adam_eps", "optimizer.epsilon"},
      {"adam_epsilon", "optimizer.epsilon"},
      {"arch", "model.size"},
      {"batch_size", "train.batch"},
      {"bf16", "train.precision"},
      {"block_size", "task.length"},
      {"bucket_size", "attention.block"},
      {"checkpoint_activations", "model.checkpoint"},
      {"clip_norm", "optimizer.clip"},
      {"context_length", "task.length"},
      {"d_ff", "model.ff_width"},
      {"d_model", "model.width"},
      {"data_dir", "task.data"},
      {"dataset", "task.data"},
      {"dim", "model.width"},
      {"dtype", "train.precision"},
      {"epochs", "train.steps"},
      {"eval_interval", "train.eval_every"},
      {"eval_iters", "train.eval_batches"},
      {"eval_steps", "train.eval_every"},
      {"ffn_dim", "model.ff_width"},
      {"finetune_from_model", "train.init"},
      {"fp16", "train.precision"},
      {"grad_clip", "optimizer.clip"},
      {"gradient_accumulation_steps", "train.accumulate"},
      {"gradient_checkpointing", "model.checkpoint"},
      {"hidden_size", "model.width"},
      {"init_from", "train.init"},
      {"learning_rate", "optimizer.rate"},
      {"log_interval", "train.log_every"},
      {"logging_steps", "train.log_every"},
      {"lr", "optimizer.rate"},
      {"lr_scheduler", "optimizer.schedule"},
      {"lr_scheduler_type", "optimizer.schedule"},
      {"max_epoch", "train.steps"},
      {"max_grad_norm", "optimizer.clip"},
      {"max_iters", "train.steps"},
      {"max_sentences", "train.batch"},
      {"max_seq_length", "task.length"},
      {"max_steps", "train.steps"},
      {"max_tokens", "train.batch_tokens"},
      {"max_update", "train.steps"},
      {"min_lr", "optimizer.final_rate"},
      {"n_embd", "model.width"},
      {"n_head", "model.heads"},
      {"n_layer", "model.layers"},
      {"num_heads", "model.heads"},
      {"num_layers", "model.layers"},
      {"num_train_epochs", "train.steps"},
      {"optim", "optimizer.name"},
      {"out_dir", "train.run"},
      {"output_dir", "train.run"},
      {"per_device_train_batch_size", "train.batch"},
      {"restore_file", "train.init"},
      {"save_dir", "train.run"},
      {"save_interval", "train.save_every"},
      {"save_steps", "train.save_every"},
      {"save_total_limit", "train.keep"},
      {"seq_len", "task.length"},
      {"seq_length", "task.length"},
      {"tie_word_embeddings", "model.tied"},
      {"tokens_per_sample", "task.length"},
      {"update_freq", "train.accumulate"},
      {"vocab_size", "task.vocab"},
      {"warmup_iters", "optimizer.warmup"},
      {"warmup_steps", "optimizer.warmup"},
      {"warmup_updates", "optimizer.warmup"},
  };
  return kNames;
}

// "--section.word" or "section.word": what tells options and keys apart is not what was misspelt.
struct Name {
  std::string section, word;

  explicit Name(const std::string& text) {
    const std::string bare = text.substr(std::min(text.find_first_not_of('-'), text.size()));
    const size_t dot = bare.find('.');
    section = dot == bare.npos ? "" : bare.substr(0, dot);
    word = dot == bare.npos ? bare : bare.substr(dot + 1);
  }
  std::string key() const { return section.empty() ? word : section + "." + word; }
};

int64_t distance(const std::string& a, const std::string& b) {
  return tasks::edit_distance({a.begin(), a.end()}, {b.begin(), b.end()});
}

std::string nearest(const Name& name, const std::vector<std::string>& candidates) {
  // The word counts most: a right word in a wrong section is nearer than a wrong word. Where no
  // section was said the first in order counts.
  using Cost = std::tuple<int64_t, int64_t>;
  Cost best{std::max<int64_t>(2, static_cast<int64_t>(name.word.size()) / 3), 1 << 20};
  std::string found;
  for (const std::string& candidate : candidates) {
    const Name other(candidate);
    const bool elsewhere = name.section != other.section;
    const Cost cost{distance(name.word, other.word) + elsewhere,
                    name.section.empty() ? 0 : distance(name.section, other.section)};
    if (cost < best) {
      best = cost;
      found = candidate;
    }
  }
  return found;
}

}  // namespace

std::string suggestion(const std::string& text, const std::vector<std::string>& candidates) {
  const Name name(text);
  std::string found = nearest(name, candidates);
  std::string word = name.word;
  std::replace(word.begin(), word.end(), '-', '_');
  const auto familiar = familiar_names().find(word);
  if (familiar != familiar_names().end() && (found.empty() || Name(found).word != name.word)) {
    const auto same = [&](const std::string& candidate) {
      return Name(candidate).key() == familiar->second;
    };
    const auto known = std::find_if(candidates.begin(), candidates.end(), same);
    if (known != candidates.end()) found = *known;
  }
  return found.empty() ? "" : "; did you mean " + found + "?";
}

}  // namespace sinkhorn::cli
