#include "cli/settings.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <sstream>

#include "sinkhorn/error.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInclude = "include";
const char* const kStacks[] = {"encoder", "decoder"};

std::vector<std::string> key_names() {
  std::vector<std::string> names;
  for (const Key& key : config_keys()) names.push_back(key.name);
  return names;
}

void check_known(const Settings& settings, const std::string& where) {
  const std::vector<std::string> known = key_names();
  for (const auto& [key, setting] : settings) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw UsageError(where + "unknown key " + key + suggestion(key, known));
    }
  }
}

// attention.x speaks for each stack that has no word of its own from the same place.
void spread_attention(Settings& settings) {
  const std::string prefix = "attention.";
  const Settings stated = settings;
  for (const auto& [key, setting] : stated) {
    if (!key.starts_with(prefix)) continue;
    for (const std::string stack : kStacks) {
      settings.emplace(stack + "." + key.substr(prefix.size()), setting);
    }
  }
}

// The file's own keys as they stand there.
Settings parse_file(const fs::path& path, const std::string& included_by) {
  const std::string where = path.string() + ": ";
  std::ifstream file(path);
  if (!file || fs::is_directory(path)) {
    throw UsageError(where + "cannot be read; expected a configuration file" +
                     (included_by.empty() ? "" : ", which " + included_by + " includes"));
  }
  constexpr std::string_view kMark = "\xEF\xBB\xBF";  // of UTF-8, which some editors put first
  std::string whole((std::istreambuf_iterator<char>(file)), {});
  if (whole.starts_with(kMark)) whole.erase(0, kMark.size());
  std::stringstream text(whole);
  if (text.view().find('\0') != std::string_view::npos) {
    throw UsageError(where + "is no text; expected a configuration file");
  }
  std::vector<CLI::ConfigItem> items;
  try {
    items = CLI::ConfigBase().from_config(text);
  } catch (const CLI::Error& error) {
    throw UsageError(where + error.what());
  }
  Settings settings;
  for (const CLI::ConfigItem& item : items) {
    if (item.name == "++" || item.name == "--") continue;  // a section begins or ends
    const std::string key = item.fullname();
    if (item.name.starts_with("[")) {
      throw UsageError(where + item.name + ": a section's name stands alone on its line");
    }
    // What CLI11 takes for a flag: most likely a line of the user's data, given in its place.
    if (const size_t end = item.name.find_first_of(" \t"); end != std::string::npos) {
      throw UsageError(where + "the line that begins with \"" + item.name.substr(0, end) +
                       "\" is no key = value; expected a configuration file, whose task.data " +
                       "names the data");
    }
    if (item.inputs.size() != 1) {
      throw UsageError(where + key + ": expected one value, found " +
                       std::to_string(item.inputs.size()) +
                       "; quote a value that holds spaces or commas");
    }
    if (!settings.emplace(key, Setting{item.inputs[0], where + key}).second) {
      throw UsageError(where + key + " is stated twice");
    }
  }
  return settings;
}

// `trail`: the files that led here, the first one first.
Settings read_included(const fs::path& path, std::vector<fs::path> trail) {
  Settings settings = parse_file(path, trail.empty() ? "" : trail.back().string());
  const fs::path same = fs::weakly_canonical(path);
  for (const fs::path& earlier : trail) {
    if (fs::weakly_canonical(earlier) == same) {
      throw UsageError(trail.back().string() + ": include: " + path.string() +
                       " includes this file in turn; expected no circle");
    }
  }
  const auto include = settings.extract(kInclude);
  check_known(settings, path.string() + ": ");
  spread_attention(settings);
  if (include.empty()) return settings;
  trail.push_back(path);
  const fs::path other = path.parent_path() / include.mapped().value;
  settings.merge(read_included(other.lexically_normal(), trail));  // keeps what this file states
  return settings;
}

}  // namespace

Settings read_settings(const fs::path& path) {
  return path.extension() == ".json" ? read_export_settings(path) : read_included(path, {});
}

Settings read_settings(const Overrides& overrides) {
  Settings settings;
  for (const auto& [key, value] : overrides) settings[key] = {value, key};
  check_known(settings, "");
  spread_attention(settings);
  return settings;
}

}  // namespace sinkhorn::cli
