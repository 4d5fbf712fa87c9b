// "Did you mean": the nearest of the words that would do, and what answers to the names that other
// programs have for the same things.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "cli/config.h"
#include "tasks/metrics.h"

namespace sinkhorn::cli {
namespace {

// What nanoGPT, fairseq and Hugging Face's trainer call a key, with _ for -; and a section alone,
// for the key that says most of it.
const std::map<std::string, std::string>& familiar_names() {
  static const std::map<std::string, std::string> kNames = {
      {"activation_dropout", "model.relu_dropout"},
      {"adam_beta1", "optimizer.beta1"},
      {"adam_beta2", "optimizer.beta2"},
      {"adam_eps", "optimizer.epsilon"},
      {"adam_epsilon", "optimizer.epsilon"},
      {"arch", "model.size"},
      {"attention", "attention.kind"},
      {"attention_probs_dropout_prob", "model.attention_dropout"},
      {"attn_pdrop", "model.attention_dropout"},
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
      {"decoder", "decoder.kind"},
      {"decoder_attention_heads", "model.heads"},
      {"decoder_embed_dim", "model.width"},
      {"decoder_ffn_embed_dim", "model.ff_width"},
      {"dim", "model.width"},
      {"dtype", "train.precision"},
      {"embd_pdrop", "model.dropout"},
      {"encoder", "encoder.kind"},
      {"encoder_attention_heads", "model.heads"},
      {"encoder_embed_dim", "model.width"},
      {"encoder_ffn_embed_dim", "model.ff_width"},
      {"eval_interval", "train.eval_every"},
      {"eval_iters", "train.eval_batches"},
      {"eval_steps", "train.eval_every"},
      {"ffn_dim", "model.ff_width"},
      {"finetune_from_model", "train.init"},
      {"fp16", "train.precision"},
      {"grad_clip", "optimizer.clip"},
      {"gradient_accumulation_steps", "train.accumulate"},
      {"gradient_checkpointing", "model.checkpoint"},
      {"hidden_dropout", "model.dropout"},
      {"hidden_dropout_prob", "model.dropout"},
      {"hidden_size", "model.width"},
      {"init_from", "train.init"},
      {"learning_rate", "optimizer.rate"},
      {"log_interval", "train.log_every"},
      {"logging_steps", "train.log_every"},
      {"lr", "optimizer.rate"},
      {"lr_scheduler", "optimizer.schedule"},
      {"lr_scheduler_type", "optimizer.schedule"},
      {"max_grad_norm", "optimizer.clip"},
      {"max_iters", "train.steps"},
      {"max_sentences", "train.batch"},
      {"max_seq_length", "task.length"},
      {"max_steps", "train.steps"},
      {"max_tokens", "train.batch_tokens"},
      {"max_update", "train.steps"},
      {"model", "model.size"},
      {"n_embd", "model.width"},
      {"n_head", "model.heads"},
      {"n_layer", "model.layers"},
      {"num_heads", "model.heads"},
      {"num_layers", "model.layers"},
      {"optim", "optimizer.name"},
      {"optimizer", "optimizer.name"},
      {"out_dir", "train.run"},
      {"output_dir", "train.run"},
      {"per_device_train_batch_size", "train.batch"},
      {"resid_pdrop", "model.dropout"},
      {"restore_file", "train.init"},
      {"save_dir", "train.run"},
      {"save_interval", "train.save_every"},
      {"save_steps", "train.save_every"},
      {"save_total_limit", "train.keep"},
      {"seq_len", "task.length"},
      {"seq_length", "task.length"},
      {"task", "task.name"},
      {"tie_word_embeddings", "model.tied"},
      {"tokens_per_sample", "task.length"},
      {"train", "train.steps"},
      {"update_freq", "train.accumulate"},
      {"vocab_size", "task.vocab"},
      {"warmup_iters", "optimizer.warmup"},
      {"warmup_steps", "optimizer.warmup"},
      {"warmup_updates", "optimizer.warmup"},
  };
  return kNames;
}

// What is said of names that no key answers to alone, where the key is among the candidates.
struct Answer {
  std::set<std::string> names;
  std::string key, text;
};

const std::vector<Answer>& answers() {
  static const std::vector<Answer> kAnswers = {
      {{"epochs", "num_epochs", "num_train_epochs", "max_epoch", "max_epochs"},
       "train.steps",
       "training is counted in steps: train.steps"},
      {{"min_lr", "stop_min_lr"},
       "optimizer.final_rate",
       "optimizer.final_rate is a share of the peak rate"},
      {{"decay_lr"},
       "optimizer.schedule",
       "optimizer.schedule says how the rate decays; constant: not at all"},
      {{"lr_decay_iters"},
       "optimizer.schedule",
       "the rate decays as optimizer.schedule says, until the last of train.steps"},
      {{"adam_betas", "betas"},
       "optimizer.beta1",
       "these are two keys, optimizer.beta1 and optimizer.beta2"},
      {{"nproc_per_node", "nnodes", "num_gpus", "world_size", "distributed_world_size"},
       "train.device",
       "a run is one process on one device: train.device"},
      {{"encoder_layers", "decoder_layers"},
       "model.layers",
       "encoder and decoder have model.layers each"},
  };
  return kAnswers;
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

// The candidate that stands for a key; "" where none does.
std::string candidate_of(const std::string& key, const std::vector<std::string>& candidates) {
  const auto is_it = [&](const std::string& candidate) { return Name(candidate).key() == key; };
  const auto found = std::find_if(candidates.begin(), candidates.end(), is_it);
  return found == candidates.end() ? "" : *found;
}

}  // namespace

std::string suggestion(const std::string& text, const std::vector<std::string>& candidates) {
  const Name name(text);
  std::string found = nearest(name, candidates);
  if (found.empty() || Name(found).word != name.word) {
    std::string word = name.word;
    std::replace(word.begin(), word.end(), '-', '_');
    for (const Answer& answer : answers()) {
      const bool fits = answer.names.contains(word);
      if (fits && !candidate_of(answer.key, candidates).empty()) return "; " + answer.text;
    }
    if (const auto familiar = familiar_names().find(word); familiar != familiar_names().end()) {
      const std::string known = candidate_of(familiar->second, candidates);
      if (!known.empty()) found = known;
    }
  }
  return found.empty() ? "" : "; did you mean " + found + "?";
}

}  // namespace sinkhorn::cli
