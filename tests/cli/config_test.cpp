// The configuration: precedence, defaults that move, messages, and the way to a file and back.
#include "cli/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>

#include "cli/fields.h"
#include "cli_support.h"
#include "sinkhorn/error.h"

namespace sinkhorn::cli {
namespace {

using train::RunConfig;

std::vector<std::string> values(RunConfig config) {
  std::vector<std::string> all;
  for (const Field& field : run_fields(config)) all.push_back(field.key + "=" + field.get());
  return all;
}

TEST(ReadConfig, DefaultsAreThoseOfTheStructsAndThePreset) {
  const RunConfig config = read_config("", {});
  RunConfig expected;
  expected.model.encoder = nn::attention_preset("default", false);
  expected.model.decoder = nn::attention_preset("default", true);
  expected.model.max_length = 0;  // from the task
  expected.train.run = "runs/sort";
  EXPECT_EQ(values(config), values(expected));
}

TEST(ReadConfig, ClassifiersHaveAPresetOfTheirOwn) {
  const RunConfig config = read("", {{"task.name", "sentiment"}, {"task.data", "folder"}});
  RunConfig expected = config;
  expected.model.encoder = nn::attention_preset("default", false, /*classifies=*/true);
  EXPECT_EQ(values(config), values(expected));
  EXPECT_EQ(config.model.encoder.window, 0);
}

TEST(ReadConfig, CommandLineOverFileOverDefaults) {
  const std::string text = "[train]\nsteps = 7  # few\nbatch = 5\n[attention]\nblock = 16\n";
  const RunConfig config = read(text, {{"train.steps", "9"}});
  EXPECT_EQ(config.train.steps, 9);
  EXPECT_EQ(config.train.batch, 5);
  EXPECT_EQ(config.train.accumulate, 1);
  EXPECT_EQ(config.model.encoder.block, 16);
  EXPECT_EQ(config.model.decoder.block, 16);
}

TEST(ReadConfig, AStackOverridesAttentionWithinOnePlace) {
  for (const char* text : {"[attention]\nblock = 16\n[encoder]\nblock = 8\n",
                           "[encoder]\nblock = 8\n[attention]\nblock = 16\n"}) {
    EXPECT_EQ(read(text).model.encoder.block, 8);
    EXPECT_EQ(read(text).model.decoder.block, 16);
    const RunConfig overridden = read(text, {{"attention.block", "4"}});
    EXPECT_EQ(overridden.model.encoder.block, 4);
    EXPECT_EQ(overridden.model.decoder.block, 4);
  }
}

TEST(ReadConfig, SizeAndPresetComeFirstWhereverTheyStand) {
  const RunConfig config =
      read("[model]\nlayers = 3\nsize = \"base\"\n[attention]\niterations = 2\n",
           {{"attention.preset", "paper"}});
  EXPECT_EQ(config.model.layers, 3);
  EXPECT_EQ(config.model.width, 512);
  EXPECT_EQ(config.model.decoder.combine, "logits");
  EXPECT_EQ(config.model.encoder.pooling, "sum");
  EXPECT_EQ(config.model.decoder.iterations, 2);
  EXPECT_EQ(config.model.max_length, 0);
}

TEST(ReadConfig, OneStackMayHaveItsOwnPreset) {
  const RunConfig config = read_config("", {{"decoder.preset", "paper"}});
  EXPECT_EQ(config.model.decoder.pooling, "sum");
  EXPECT_EQ(config.model.encoder.pooling, "mean");
}

TEST(ReadConfig, TheOptimizerFollowsTheSize) {
  const auto optimizer = [](const Overrides& keys) { return read_config("", keys).optimizer; };
  EXPECT_EQ(optimizer({}).name, "adamw");
  EXPECT_EQ(optimizer({}).schedule, "cosine");
  for (const char* size : {"tiny", "base"}) {
    EXPECT_EQ(optimizer({{"model.size", size}}).name, "adam");
    EXPECT_EQ(optimizer({{"model.size", size}}).schedule, "noam");
    EXPECT_EQ(optimizer({{"model.size", size}}).warmup, 8000);
    EXPECT_EQ(optimizer({{"model.size", size}}).rate, 1.0);
    EXPECT_EQ(optimizer({{"model.size", size}}).beta2, 0.997);
    EXPECT_EQ(optimizer({{"model.size", size}}).epsilon, 1e-9);
  }
  for (const char* size : {"lm_base", "lm_big"}) {
    EXPECT_EQ(optimizer({{"model.size", size}}).name, "adafactor");
    EXPECT_EQ(optimizer({{"model.size", size}}).schedule, "rsqrt");
    EXPECT_EQ(optimizer({{"model.size", size}}).warmup, 10000);
  }
  // A schedule that was asked for brings its own numbers.
  const auto mixed = optimizer({{"model.size", "base"}, {"optimizer.schedule", "cosine"}});
  EXPECT_EQ(mixed.name, "adam");
  EXPECT_EQ(mixed.rate, 1e-3);
  EXPECT_EQ(mixed.warmup, 500);
}

TEST(ReadConfig, DecodersSortByTheBilinearNetworkUnlessTold) {
  const auto sort_net = [](const Overrides& keys) {
    return read_config("", keys).model.decoder.sort_net;
  };
  EXPECT_EQ(sort_net({}), "bilinear");  // it has no limit of length
  EXPECT_EQ(sort_net({{"attention.sort_net", "mlp"}}), "mlp");
  EXPECT_EQ(sort_net({{"attention.preset", "paper"}}), "linear");
}

TEST(ReadConfig, WhatIsWrittenDownSaysNoAuto) {
  const RunConfig config = read_config("", {{"attention.columns", "auto"}});
  EXPECT_EQ(config.model.encoder.columns, "full");
  EXPECT_EQ(config.model.decoder.columns, "prefix");
  EXPECT_EQ(write_config(config).find("columns = \"auto\""), std::string::npos);
}

TEST(ReadConfig, TheRunIsNamedAfterTheFile) {
  const ConfigFile file("");
  EXPECT_EQ(read_config(file.path(), {}).train.run, "runs/" + file.path().stem().string());
  EXPECT_EQ(read_config(file.path(), {{"train.run", "here"}}).train.run, "here");
}

TEST(ReadConfig, TruthHasManySpellings) {
  for (const char* word : {"true", "True", "on", "yes", "1"}) {
    EXPECT_TRUE(read_config("", {{"model.checkpoint", word}}).model.checkpoint) << word;
  }
  for (const char* word : {"false", "False", "off", "no", "0"}) {
    EXPECT_FALSE(read_config("", {{"model.tied", word}}).model.tied) << word;
  }
}

TEST(ReadConfig, UnknownKeysSuggestTheNearest) {
  EXPECT_EQ(refusal("[attention]\nblok = 3\n"),
            "FILE:2: unknown key attention.blok; did you mean attention.block?");
  EXPECT_EQ(refusal("steps = 3\n"), "FILE:1: unknown key steps; did you mean train.steps?");
  EXPECT_EQ(refusal("[atention]\nblock = 3\n"),
            "FILE:2: unknown key atention.block; did you mean attention.block?");
  EXPECT_EQ(refusal("[train]\nwarmup = 3\n"),
            "FILE:2: unknown key train.warmup; did you mean optimizer.warmup?");
  EXPECT_EQ(refusal("", {{"model.witdh", "3"}}),
            "unknown key model.witdh; did you mean model.width?");
  // A section that was not said is none that was misspelt: the first that has the word.
  EXPECT_EQ(refusal("", {{"block", "3"}}), "unknown key block; did you mean attention.block?");
  EXPECT_EQ(refusal("[train]\nqqqqqqqq = 3\n"), "FILE:2: unknown key train.qqqqqqqq");
}

TEST(ReadConfig, WrongValuesSayWhatWasExpected) {
  EXPECT_EQ(refusal("", {{"train.steps", "many"}}), "train.steps: \"many\" is not a whole number");
  EXPECT_EQ(refusal("[train]\nsteps = 1.5\n"),
            "FILE:2: train.steps: \"1.5\" is not a whole number");
  EXPECT_EQ(refusal("", {{"train.steps", ""}}), "train.steps: \"\" is not a whole number");
  EXPECT_EQ(refusal("", {{"train.steps", "99999999999999999999"}}),
            "train.steps: \"99999999999999999999\" is too large");
  EXPECT_EQ(refusal("", {{"train.batch", "0"}}),
            "train.batch: 0 is out of range; expected 1 to 1048576");
  EXPECT_EQ(refusal("", {{"train.seed", "-1"}}), "train.seed: \"-1\" is not a whole number");
  EXPECT_EQ(refusal("", {{"model.dropout", "1"}}),
            "model.dropout: 1 is out of range; expected at least 0 and less than 1");
  EXPECT_EQ(refusal("", {{"optimizer.rate", "nan"}}), "optimizer.rate: \"nan\" is not a number");
  EXPECT_EQ(refusal("", {{"train.graph", "maybe"}}),
            "train.graph: \"maybe\" is neither true nor false");
  EXPECT_EQ(refusal("[optimizer]\nname = sgd\n"),
            "FILE:2: optimizer.name: \"sgd\" is not one of adamw, adam, adafactor");
  EXPECT_EQ(refusal("[attention]\nblock = x\n"),
            "FILE:2: attention.block: \"x\" is not a whole number");
  EXPECT_EQ(refusal("", {{"model.size", "huge"}}),
            "model.size: \"huge\" is not one of tiny, base, lm_base, lm_big");
}

TEST(ReadConfig, MalformedFilesAreRefused) {
  EXPECT_EQ(refusal("[train]\nsteps = 1\nbatch = 2\nsteps = 3\n"),
            "FILE:4: train.steps is stated twice; the first time in line 2");
  EXPECT_EQ(refusal("[model]\nlayers = 1\n[train]  # here\nsteps = 1\n"),
            "FILE:3: [train]: a section's name stands alone on its line");
  EXPECT_EQ(refusal("[model]\n  [train]layers = 1\n"),
            "FILE:2: [train]: a section's name stands alone on its line");
  EXPECT_EQ(refusal("\n[train\nsteps = 1\n"), "FILE:2: [train: a section's name ends with a ]");
  EXPECT_EQ(refusal("[train]\r\nsteps = x\r\n"),
            "FILE:2: train.steps: \"x\" is not a whole number");
  EXPECT_EQ(refusal("[task]\ndata = my folder\n"),
            "FILE:2: task.data: expected one value, found 2; quote a value that holds spaces or "
            "commas");
  EXPECT_THROW(read_config("/nowhere/at/all.ini", {}), UsageError);
  EXPECT_THROW(read_config("/", {}), UsageError);
}

TEST(CheckConfig, RefusesWhatDoesNotGoTogether) {
  EXPECT_EQ(refusal("", {{"model.heads", "3"}}),
            "model.heads: 3 heads do not share model.width 128 evenly");
  EXPECT_EQ(refusal("", {{"train.device", "tpu"}}),
            "train.device: \"tpu\" is not one of auto, cpu, cuda, cuda:N");
  EXPECT_EQ(refusal("", {{"task.name", "lm"}}),
            "task.data: the task lm needs the folder or file of its data");
  EXPECT_EQ(refusal("", {{"attention.kind", "sortcut"}}).substr(0, 33),
            "attention.kind: sortcut cannot be");
  // A classifier has no decoder to refuse it.
  EXPECT_NO_THROW(
      read_config("", {{"task.name", "nli"}, {"task.data", "x"}, {"attention.kind", "sortcut"}}));
}

// What does not go together is said of the line that stated it.
TEST(CheckConfig, NamesFileAndLine) {
  const auto begins = [](const std::string& text, const Overrides& overrides,
                         const std::string& expected) {
    const std::string said = refusal(text, overrides);
    EXPECT_EQ(said.substr(0, expected.size()), expected);
  };
  begins("[train]\nsteps = 1\n[decoder]\nkind = sortcut\n", {}, "FILE:4: decoder.kind: sortcut");
  begins("[attention]\nkind = sortcut\n", {}, "FILE:2: attention.kind: sortcut cannot");
  begins("[attention]\nblock = 8\npreset = paper\n", {{"attention.window", "1"}},
         "FILE:3: attention.preset: combine 'logits' adds block to block and needs window 0");
  begins("[encoder]\npooling = recent\n", {}, "FILE:2: encoder.pooling: pooling 'recent'");
  begins("[attention]\nkind = sparse\nstride = 4\n", {}, "FILE:3: attention.stride: summary (8)");
  begins("[attention]\nkind = sparse\nsummary = 99\nstride = 4\n", {},
         "FILE:3: attention.summary: summary (99)");
  begins("[model]\nheads = 3\n", {}, "FILE:2: model.heads: 3 heads do not share model.width 128");
  begins("[model]\nwidth = 130\n", {}, "FILE:2: model.width: 130 is not shared evenly by 4 heads");
  begins("[model]\nwidth = 130\n", {{"model.heads", "3"}}, "model.heads: 3 heads do not share");
  begins("\n[task]\nname = lm\n", {}, "FILE:3: task.data: the task lm needs the folder or file");
  begins("[task]\nname = text\n", {{"task.name", "lm"}}, "task.data: the task lm needs");
  begins("[train]\ndevice = tpu\n", {}, "FILE:2: train.device: \"tpu\" is not one of");
}

// Files that include one another, in a folder of their own.
class ConfigFolder {
 public:
  ConfigFolder()
      : path_(std::filesystem::temp_directory_path() / ("sinkhorn-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path_ / "deep");
  }
  ~ConfigFolder() { std::filesystem::remove_all(path_); }
  std::filesystem::path write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name) << text;
    return path_ / name;
  }
  // The message, without the folder.
  std::string refusal(const std::filesystem::path& file) const {
    try {
      read_config(file, {});
    } catch (const UsageError& error) {
      std::string message = error.what();
      const std::string place = path_.string() + "/";
      for (size_t at; (at = message.find(place)) != std::string::npos;) {
        message.erase(at, place.size());
      }
      return message;
    }
    return "nothing was thrown";
  }

 private:
  std::filesystem::path path_;
};

TEST(Include, CommandLineOverFileOverIncludedOverDefaults) {
  const ConfigFolder folder;
  folder.write("common.ini", "[train]\nsteps = 1\nbatch = 2\naccumulate = 3\n");
  folder.write("middle.ini", "include = common.ini\n[train]\nsteps = 4\nbatch = 5\n");
  const auto row =
      folder.write("deep/row.ini", "include = \"../middle.ini\"\n[train]\nsteps = 6\n");
  const RunConfig config = read_config(row, {{"train.keep", "7"}});
  EXPECT_EQ(config.train.steps, 6);
  EXPECT_EQ(config.train.batch, 5);
  EXPECT_EQ(config.train.accumulate, 3);
  EXPECT_EQ(config.train.keep, 7);
  EXPECT_EQ(config.train.save_every, 500);
  EXPECT_EQ(config.train.run, "runs/row");
}

TEST(Include, EachFileIsOnePlaceForAttention) {
  const ConfigFolder folder;
  folder.write("common.ini", "[encoder]\nblock = 8\n[attention]\npreset = paper\n");
  const auto row = folder.write("row.ini", "include = common.ini\n[attention]\nblock = 16\n");
  EXPECT_EQ(read_config(row, {}).model.encoder.block, 16);
  EXPECT_EQ(read_config(row, {}).model.encoder.pooling, "sum");
}

TEST(Include, LaterFilesStandOverEarlierOnes) {
  const ConfigFolder folder;
  const auto row = folder.write("row.ini", "[train]\nsteps = 1\nbatch = 2\n");
  const auto scale = folder.write("scale.ini", "[train]\nsteps = 3\n");
  const RunConfig config = read_config({row, scale}, {});
  EXPECT_EQ(config.train.steps, 3);
  EXPECT_EQ(config.train.batch, 2);
  EXPECT_EQ(config.train.run, "runs/row");
}

TEST(Include, SaysWhatIsWrongAndWhere) {
  const ConfigFolder folder;
  folder.write("a.ini", "include = b.ini\n");
  folder.write("b.ini", "include = a.ini\n");
  EXPECT_EQ(folder.refusal(folder.write("c.ini", "include = a.ini\n")),
            "b.ini: include: a.ini includes this file in turn; expected no circle");
  EXPECT_EQ(folder.refusal(folder.write("a.ini", "include = a.ini\n")),
            "a.ini: include: a.ini includes this file in turn; expected no circle");
  EXPECT_EQ(folder.refusal(folder.write("c.ini", "include = none.ini\n")),
            "none.ini: cannot be read; expected a configuration file, which c.ini includes");
  folder.write("b.ini", "[train]\nstep = 1\n");
  EXPECT_EQ(folder.refusal(folder.write("c.ini", "include = b.ini\n")),
            "b.ini:2: unknown key train.step; did you mean train.steps?");
  EXPECT_EQ(folder.refusal(folder.write("c.ini", "[train]\ninclude = b.ini\n")),
            "c.ini:2: unknown key train.include");
}

// Any value that the field may hold.
std::string draw(const Field& field, std::mt19937_64& random) {
  if (!field.words.empty()) return field.words[random() % field.words.size()];
  if (std::holds_alternative<bool*>(field.value)) return random() % 2 ? "true" : "false";
  if (std::holds_alternative<double*>(field.value)) {
    return std::to_string(std::uniform_real_distribution(0.001, 0.999)(random));
  }
  if (!std::holds_alternative<std::string*>(field.value))
    return std::to_string(1 + random() % 1000);
  const std::vector<std::string> letters = {"a", "b", "/", ".", ",", "=", ";", "[", "]",       "{",
                                            "}", "'", " ", "-", "_", "~", "$", "%", "\xc3\xa9"};
  std::string text = "x";
  for (uint64_t i = random() % 12; i > 0; --i) text += letters[random() % letters.size()];
  return text + "x";
}

TEST(WriteConfig, ReadsBackToTheSameForRandomConfigurations) {
  std::mt19937_64 random(7);
  int tried = 0, accepted = 0;
  while (accepted < 100 && tried < 100000) {
    ++tried;
    RunConfig config;
    for (const Field& field : run_fields(config)) field.set(draw(field, random), field.key);
    config.model.width = config.model.heads * 8;
    config.model.encoder = nn::resolve_attention(config.model.encoder, false);
    config.model.decoder = nn::resolve_attention(config.model.decoder, true);
    config.train.device = tried % 2 ? "cuda:1" : "cpu";
    config.train.seed = random();
    config.optimizer.rate = std::ldexp(1.0 + 1.0 / 3.0, -static_cast<int>(random() % 40));
    try {
      check_config(config);
    } catch (const UsageError&) {
      continue;
    }
    ++accepted;
    const std::string text = write_config(config);
    const RunConfig back = read(text);
    ASSERT_EQ(values(back), values(config)) << text;
    ASSERT_EQ(write_config(back), text);
  }
  EXPECT_EQ(accepted, 100) << "of " << tried;
}

TEST(WriteConfig, HoldsEmptyWordsAndWhatWasResolved) {
  const RunConfig config = read_config("", {{"model.size", "base"}, {"attention.preset", "paper"}});
  EXPECT_EQ(values(read(write_config(config))), values(config));
  EXPECT_THROW(read_config("", {{"task.cache", "a\"b"}}), UsageError);
  EXPECT_THROW(read_config("", {{"task.cache", "a#b"}}), UsageError);
}

TEST(ConfigKeys, CoverEveryFieldOnceWithHelp) {
  std::vector<std::string> names;
  for (const Key& key : config_keys()) {
    EXPECT_FALSE(key.help.empty()) << key.name;
    EXPECT_EQ(std::count(names.begin(), names.end(), key.name), 0) << key.name;
    names.push_back(key.name);
  }
  RunConfig config;
  for (const Field& field : run_fields(config)) {
    EXPECT_EQ(std::count(names.begin(), names.end(), field.key), 1) << field.key;
  }
  for (const char* name :
       {"model.size", "attention.preset", "attention.tie_kv", "decoder.preset"}) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  }
}

TEST(Configs, EveryFileOfTheRepositoryReads) {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(SINKHORN_CONFIGS)) {
    if (entry.path().extension() != ".ini") continue;
    ++files;
    SCOPED_TRACE(entry.path());
    RunConfig config;
    ASSERT_NO_THROW(config = read_config(entry.path(), {}));
    EXPECT_EQ(values(read(write_config(config))), values(config));
  }
  EXPECT_GE(files, 3);
}

}  // namespace
}  // namespace sinkhorn::cli
