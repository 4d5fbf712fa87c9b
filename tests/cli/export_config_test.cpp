// The configuration in an export's config.json: back to the same model, or refused by file and key.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "cli/config.h"
#include "sinkhorn/error.h"
#include "train/scratch.h"

namespace sinkhorn::cli {
namespace {

using json = nlohmann::ordered_json;

std::string exported(const train::RunConfig& config) {
  json object = {{"format", "sinkhorn export 1"}, {"step", 12}};
  object.update(json::parse(write_export_config(config)));
  return object.dump(2);
}

TEST(ExportConfig, ReadsBackToTheSameModel) {
  const test::Scratch scratch;
  const train::RunConfig config = read_config("", {{"task.name", "text"},
                                                   {"task.data", "a folder/of, text"},
                                                   {"model.dropout", "0.125"},
                                                   {"model.tied", "false"},
                                                   {"decoder.temperature", "0.3"},
                                                   {"encoder.kind", "full"},
                                                   {"train.seed", "18446744073709551615"}});
  test::write_bytes(scratch / "config.json", exported(config));
  const train::RunConfig back = read_config(scratch / "config.json", {});
  EXPECT_EQ(exported(back), exported(config));
  EXPECT_EQ(back.train.seed, config.train.seed);
  EXPECT_EQ(back.task.data, "a folder/of, text");
  EXPECT_EQ(read_config(scratch / "config.json", {{"task.data", "here"}}).task.data, "here");
}

// Every key, taken out or made something else; and bytes that are no configuration at all.
TEST(ExportConfig, WhatIsSpoiledIsRefusedByFileAndKey) {
  const test::Scratch scratch;
  const auto path = scratch / "config.json";
  const auto refusal = [&](const std::string& text) -> std::string {
    test::write_bytes(path, text);
    try {
      read_config(path, {});
      return "";
    } catch (const UsageError& error) {
      return error.what();
    }
  };
  const json sound = json::parse(exported(read_config("", {})));
  for (const auto& [section, keys] : sound.items()) {
    if (!keys.is_object()) continue;
    for (const auto& [name, value] : keys.items()) {
      const std::string start = path.string() + ": " + section + "." + name;
      json spoiled = sound;
      spoiled[section].erase(name);
      EXPECT_TRUE(refusal(spoiled.dump()).starts_with(start + " is missing")) << start;
      for (const json& other : {json(nullptr), json::array({1}), json::object()}) {
        spoiled[section][name] = other;
        EXPECT_TRUE(refusal(spoiled.dump()).starts_with(start + ": found ")) << start;
      }
    }
  }
  EXPECT_EQ(refusal(sound.dump()), "");
}

TEST(ExportConfig, MutatedBytesAreReadOrRefused) {
  const test::Scratch scratch;
  const auto path = scratch / "config.json";
  const std::string sound = exported(read_config("", {}));
  std::mt19937 random(3);
  int refused = 0;
  constexpr int kRounds = 3000;
  for (int round = 0; round < kRounds; ++round) {
    std::string bytes = sound;
    if (round % 5 == 0) bytes.resize(random() % bytes.size());
    for (unsigned edits = round % 5 == 0 ? 0 : 1 + random() % 3; edits > 0; --edits) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    test::write_bytes(path, bytes);
    try {
      read_config(path, {});
    } catch (const UsageError& error) {
      ++refused;
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(refused, kRounds / 2);
}

}  // namespace
}  // namespace sinkhorn::cli
