// What a configuration file or a command line states, key by key, before it becomes a RunConfig.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "cli/config.h"

namespace sinkhorn::cli {

// A value as somebody wrote it; name is how to speak of it: "file:7: key", 7 its line, or "key".
struct Setting {
  std::string value;
  std::string name;
};
using Settings = std::map<std::string, Setting>;

// A file over the one it includes: a first key `include = other.ini`, outside of any section, its
// path relative to the file's own folder. Keys are known, `attention.x` is spread over both stacks.
Settings read_settings(const std::filesystem::path& path);
Settings read_settings(const Overrides& overrides);
// The config.json of an export; all of it, since the default of a lost key would be another model.
Settings read_export_settings(const std::filesystem::path& path);

}  // namespace sinkhorn::cli
