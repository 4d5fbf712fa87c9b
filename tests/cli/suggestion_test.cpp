// What is said of a key that is not known.
#include <gtest/gtest.h>

#include "cli_support.h"

namespace sinkhorn::cli {
namespace {

// Of all keys, as files and as command lines have them.
std::vector<std::string> names_behind(const std::string& prefix) {
  std::vector<std::string> names;
  for (const Key& key : config_keys()) names.push_back(prefix + key.name);
  return names;
}

// What is called otherwise in nanoGPT, fairseq and Hugging Face's trainer.
TEST(Suggestion, KnowsOtherProgramsNames) {
  const std::vector<std::string> keys = names_behind(""), options = names_behind("--");
  const std::vector<std::pair<std::string, std::string>> names = {
      {"lr", "optimizer.rate"},
      {"learning-rate", "optimizer.rate"},
      {"batch_size", "train.batch"},
      {"max_iters", "train.steps"},
      {"block_size", "task.length"},
      {"n_layer", "model.layers"},
      {"n_embd", "model.width"},
      {"save-dir", "train.run"},
      {"clip-norm", "optimizer.clip"},
      {"init_from", "train.init"},
      {"update-freq", "train.accumulate"},
      {"adam_beta2", "optimizer.beta2"},
      {"attn_pdrop", "model.attention_dropout"},
      {"resid_pdrop", "model.dropout"},
      {"activation-dropout", "model.relu_dropout"},
      {"encoder-embed-dim", "model.width"}};
  for (const auto& [name, key] : names) {
    EXPECT_EQ(suggestion(name, keys), "; did you mean " + key + "?");
    EXPECT_EQ(suggestion("--" + name, options), "; did you mean --" + key + "?");
  }
  EXPECT_EQ(suggestion("--steps", options), "; did you mean --train.steps?");
  EXPECT_EQ(suggestion("--divice", options), "; did you mean --train.device?");
  EXPECT_EQ(suggestion("--dropout", options), "; did you mean --model.dropout?");
  EXPECT_EQ(suggestion("lr", {"steps"}), "");
}

TEST(Suggestion, ASectionAloneIsTheKeyThatSaysMostOfIt) {
  const std::vector<std::string> options = names_behind("--");
  for (const char* key : {"task.name", "model.size", "attention.kind", "encoder.kind",
                          "decoder.kind", "optimizer.name", "train.steps"}) {
    const std::string option = std::string("--") + key;
    EXPECT_EQ(suggestion(option.substr(0, option.find('.')), options),
              "; did you mean " + option + "?");
  }
  EXPECT_EQ(refusal("optimizer = adam\n"),
            "FILE:1: unknown key optimizer; did you mean optimizer.name?");
}

// What other programs have and no key answers to alone.
TEST(Suggestion, SaysWhereThereIsNoCounterpart) {
  const std::vector<std::string> keys = names_behind(""), options = names_behind("--");
  const std::vector<std::pair<std::vector<std::string>, std::string>> answers = {
      {{"epochs", "num_train_epochs", "max-epoch", "max_epochs"},
       "training is counted in steps: train.steps"},
      {{"min_lr"}, "optimizer.final_rate is a share of the peak rate"},
      {{"decay_lr"}, "optimizer.schedule says how the rate decays; constant: not at all"},
      {{"lr_decay_iters"},
       "the rate decays as optimizer.schedule says, until the last of train.steps"},
      {{"adam-betas", "adam_betas"}, "these are two keys, optimizer.beta1 and optimizer.beta2"},
      {{"nproc_per_node", "nproc-per-node", "nnodes"},
       "a run is one process on one device: train.device"},
      {{"encoder-layers", "decoder_layers"}, "encoder and decoder have model.layers each"}};
  for (const auto& [names, answer] : answers) {
    for (const std::string& name : names) {
      EXPECT_EQ(suggestion(name, keys), "; " + answer);
      EXPECT_EQ(suggestion("--" + name, options), "; " + answer);
      EXPECT_EQ(suggestion("train." + name, keys), "; " + answer);
      EXPECT_EQ(suggestion(name, {"attention.block"}), "");  // where there is no such key
    }
  }
  EXPECT_EQ(refusal("[train]\nepochs = 3\n"),
            "FILE:2: unknown key train.epochs; training is counted in steps: train.steps");
}

}  // namespace
}  // namespace sinkhorn::cli
