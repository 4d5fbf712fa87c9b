// From a file and a command line to one RunConfig, and back to a file.
//
// A key is section.name. The command line stands over the file, the file over the one it includes
// (`include = other.ini`, before any section), all over the defaults, whatever the order of keys.
// `attention.x` is `encoder.x` and `decoder.x` at once; where one place states both, the stack's
// own key wins. model.size and the presets only move the defaults.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "train/config.h"

namespace sinkhorn::cli {

using Overrides = std::vector<std::pair<std::string, std::string>>;  // key, value; the last wins

// Reads `path` ("": no file), then the overrides; checked. Throws UsageError with the file and key.
train::RunConfig read_config(const std::filesystem::path& path, const Overrides& overrides);
// The same of several files, each over those before it.
train::RunConfig read_config(const std::vector<std::filesystem::path>& files,
                             const Overrides& overrides);

// Whether any of them says what to learn; the default task is trained otherwise.
bool names_task(const std::filesystem::path& path, const Overrides& overrides);

// Makes where data and train.init lie the same from wherever the run is used later on.
void make_absolute(train::RunConfig& config);

// All keys, resolved: reads back to the same configuration.
std::string write_config(const train::RunConfig& config);
// The same for the config.json of an export, which read_config reads as well: a JSON object of
// sections, without what only training needs.
std::string write_export_config(const train::RunConfig& config);

// Throws UsageError for values that are fine one by one but do not go together.
void check_config(const train::RunConfig& config);

// What a key is called, holds and means, for help and completion.
struct Key {
  std::string name;      // section.key
  std::string type;      // INT, NUMBER, TEXT or {one,of,these}
  std::string standard;  // its default
  std::string help;

  std::string section() const { return name.substr(0, name.find('.')); }
};
std::vector<Key> config_keys();

// "; did you mean X?" with the nearest candidate, or the one that another program calls so, or a
// sentence where that has no counterpart; "" where there is nothing to say.
std::string suggestion(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace sinkhorn::cli
