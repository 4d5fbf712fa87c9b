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

void check_known(const Settings& settings) {
  const std::vector<std::string> known = key_names();
  for (const auto& [key, setting] : settings) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      const std::string where = setting.name.substr(0, setting.name.size() - key.size());
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

std::string_view trimmed(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(" \t\r"), text.size());
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

bool says_nothing(std::string_view line) {
  line = trimmed(line);
  return line.empty() || line[0] == '#' || line[0] == ';';
}

// The name in "[name]": CLI11 would take any other line that begins so for a key.
std::string section_of(std::string_view line, const std::string& where) {
  const size_t end = line.find(']');
  if (end + 1 == line.size()) return std::string(line.substr(1, end - 1));
  const bool closed = end != line.npos;
  throw UsageError(where + std::string(line.substr(0, closed ? end + 1 : 40)) +
                   (closed ? ": a section's name stands alone on its line"
                           : ": a section's name ends with a ]"));
}

// CLI11 passes over some lines that say nothing it knows, and ends a value at a #, quoted or not.
void check_line(std::string_view line, const std::string& where) {
  const size_t equals = line.find('=');
  if (equals == line.npos || equals == 0) {
    const size_t word = std::min<size_t>(line.find_first_of(" \t"), 40);
    throw UsageError(where + "the line that begins with \"" + std::string(line.substr(0, word)) +
                     "\" is no key = value; expected a configuration file, whose task.data " +
                     "names the data");
  }
  const std::string_view value = line.substr(equals + 1);
  const size_t mark = value.find('#');
  if (mark == value.npos || mark == 0) return;
  const size_t first = value.find_first_not_of(" \t");
  const bool opens = value[first] == '"' || value[first] == '\'';
  const bool quoted = opens && mark < value.find(value[first], first + 1);
  const bool begins_comment = value[mark - 1] == ' ' || value[mark - 1] == '\t';
  if (quoted || !begins_comment) {
    throw UsageError(where + std::string(line.substr(0, line.find_first_of(" \t="))) +
                     ": the value holds a #, which configurations cannot; a comment stands behind "
                     "a space");
  }
}

// The line where each key is stated, after every line was checked.
std::map<std::string, int64_t> lines_of_keys(std::istream& text, const std::string& file) {
  std::map<std::string, int64_t> lines;
  std::string line, section;
  for (int64_t number = 1; std::getline(text, line); ++number) {
    if (says_nothing(line)) continue;
    const std::string where = file + ":" + std::to_string(number) + ": ";
    const std::string_view stated = trimmed(line);
    if (stated.starts_with("[")) {
      section = section_of(stated, where) + ".";
      continue;
    }
    check_line(stated, where);
    if (const size_t equals = stated.find('='); equals != stated.npos) {
      const std::string key = section + std::string(trimmed(stated.substr(0, equals)));
      const auto [found, is_first] = lines.emplace(key, number);
      if (!is_first) {
        throw UsageError(where + key + " is stated twice; the first time in line " +
                         std::to_string(found->second));
      }
    }
  }
  return lines;
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
  const auto lines = lines_of_keys(text, path.string());
  const auto place_of = [&](const std::string& key) {
    const auto found = lines.find(key);
    return found == lines.end() ? where
                                : path.string() + ":" + std::to_string(found->second) + ": ";
  };
  text = std::stringstream(whole);
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
    if (item.inputs.size() != 1) {
      throw UsageError(place_of(key) + key + ": expected one value, found " +
                       std::to_string(item.inputs.size()) +
                       "; quote a value that holds spaces or commas");
    }
    settings.emplace(key, Setting{item.inputs[0], place_of(key) + key});
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
  check_known(settings);
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
  check_known(settings);
  spread_attention(settings);
  return settings;
}

}  // namespace sinkhorn::cli
