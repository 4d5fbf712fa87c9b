// The configuration in the config.json of an export: the same keys as a run's config.ini, as JSON.
// What only training reads is left out.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/fields.h"
#include "cli/settings.h"
#include "models/files.h"
#include "sinkhorn/error.h"
#include "train/export_folder.h"

namespace sinkhorn::cli {
namespace {

using json = nlohmann::ordered_json;

const std::vector<std::string> kSections = {"task", "model", "encoder", "decoder", "train"};
const std::vector<std::string> kTrainKeys = {"train.precision", "train.batch", "train.batch_tokens",
                                             "train.seed", "train.greedy"};

bool contains(const std::vector<std::string>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Fields that an export keeps, bound to the configuration.
Fields kept_fields(train::RunConfig& config) {
  Fields kept;
  for (const Field& field : run_fields(config)) {
    const bool wanted = field.section() == "train" ? contains(kTrainKeys, field.key)
                                                   : contains(kSections, field.section());
    if (wanted) kept.push_back(field);
  }
  return kept;
}

std::string text_of(const json& value, const std::string& name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  throw UsageError(name + ": found " + value.type_name() + ", expected a number or a word");
}

json read_object(const std::filesystem::path& path) {
  const std::string where = path.string() + ": ";
  json object = json::parse(models::read_text(path), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    throw UsageError(where + "not a JSON object; expected the config.json of an export");
  }
  const json format = object.value("format", json());
  if (format == train::kExportFormat) return object;
  const bool ours = format.is_string() && format.get<std::string>().starts_with("sinkhorn export");
  throw UsageError(where + (ours ? "written by another version of the program; export the run again"
                                 : "not of an export: expected \"format\": \"" +
                                       std::string(train::kExportFormat) + "\" in it"));
}

}  // namespace

std::string write_export_config(const train::RunConfig& config) {
  train::RunConfig copy = config;
  json object;
  for (const Field& field : kept_fields(copy)) {
    const std::string section(field.section());
    json& place = object[section][field.key.substr(section.size() + 1)];
    std::visit([&](const auto* variable) { place = *variable; }, field.value);
  }
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

Settings read_export_settings(const std::filesystem::path& path) {
  const json object = read_object(path);
  Settings settings;
  for (const std::string& section : kSections) {
    const std::string where = path.string() + ": " + section;
    const auto found = object.find(section);
    if (found == object.end() || !found->is_object()) {
      throw UsageError(where + " is missing or not an object; export the run again");
    }
    for (const auto& [name, value] : found->items()) {
      const std::string full = where + "." + name;
      settings[section + "." + name] = {text_of(value, full), full};
    }
  }
  train::RunConfig config;
  std::vector<std::string> known;
  for (const Field& field : kept_fields(config)) {
    known.push_back(field.key);
    if (!settings.contains(field.key)) {
      throw UsageError(path.string() + ": " + field.key + " is missing; export the run again");
    }
  }
  for (const auto& [key, setting] : settings) {
    if (!contains(known, key))
      throw UsageError(setting.name + ": unknown" + suggestion(key, known));
  }
  return settings;
}

}  // namespace sinkhorn::cli
