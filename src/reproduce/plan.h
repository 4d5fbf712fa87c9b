// Which runs a table asks for, each with its whole configuration.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reproduce/catalogue.h"
#include "train/config.h"

namespace sinkhorn::reproduce {

using Overrides = std::vector<std::pair<std::string, std::string>>;  // section.key, value

// How configurations are read and written: the program's business.
struct ConfigLanguage {
  std::function<train::RunConfig(const std::vector<std::filesystem::path>&, const Overrides&)> read;
  std::function<std::string(const train::RunConfig&)> write;
};

struct Options {
  std::filesystem::path configs;  // the folder of tables
  std::string name;
  std::string scale = "smoke";
  std::vector<std::string> rows;      // ids or names; empty: all
  std::vector<std::string> variants;  // names; empty: all
  std::filesystem::path data;         // holds the publishers' folders; "": where configurations say
  std::filesystem::path out = "runs/reproduce";
  std::string preset = "default";  // paper: the literal rows, too
  std::string device = "auto";
  int64_t seeds = 1;
  int64_t jobs = 0;  // runs at a time; 0: as many as there is room for
  bool tune = false;
};

// For a table that trains nothing: UsageError for an option that only a training could heed.
void refuse_what_trains(const Table& table, const Options& options);

// What tuning picked.
struct Picks {
  double temperature = 0;
  int64_t iterations = 0;
};

struct Run {
  size_t row, variant;  // of the table
  int64_t seed;
  std::filesystem::path folder;
  train::RunConfig config;
  std::string hash;     // of what decides the result, but for the seed
  bool leaks;           // its columns read the future
  std::string dataset;  // the publisher's folder, by name
  std::optional<Picks> picks;
};

class Planner {
 public:
  // Reads every configuration once. Throws UsageError for a row that the table does not have.
  Planner(const Table& table, const Options& options, ConfigLanguage language);

  // Whether a row is asked for, by --rows and --preset.
  bool wants(const Row& row, const Variant& variant) const;
  bool trains(const Row& row, const Variant& variant) const;
  Run run(size_t row, size_t variant, int64_t seed, const std::optional<Picks>& picks) const;
  // A short run in a folder of its own, to choose by.
  Run trial(size_t row, size_t variant, const std::string& name, const Picks& picks) const;

  std::string text(const Run& run) const { return language_.write(run.config); }

 private:
  // A run in a folder; what is not its own is as the files say.
  Run make(size_t row, size_t variant, const std::filesystem::path& folder, int64_t seed,
           const std::optional<Picks>& picks) const;
  std::filesystem::path folder(size_t row, size_t variant) const;

  const Table& table_;
  const Options& options_;
  ConfigLanguage language_;
  std::map<std::pair<size_t, size_t>, train::RunConfig> configs_;  // row, variant
};

// Of a configuration as text: the same wherever its data and its folder lie and whatever it runs
// on.
std::string config_hash(const std::string& text);

bool sorts(const train::RunConfig& config);

}  // namespace sinkhorn::reproduce
