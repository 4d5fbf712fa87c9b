#include "train/export_check.h"

#include <zlib.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "models/files.h"
#include "sinkhorn/error.h"
#include "sinkhorn/models/safetensors.h"
#include "tasks/deferred.h"
#include "tasks/files.h"
#include "train/export_folder.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

constexpr const char* kFiles[] = {kExportModel, kExportTokenizer};

struct TypeName {
  const char* word;
  at::ScalarType type;
};
constexpr TypeName kTypes[] = {
    {"float32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw Error(path.string() + ": " + what);
}

json value_at(const json& config, const char* pointer) {
  const json::json_pointer place(pointer);
  return config.contains(place) ? config.at(place) : json();
}

// Whether the task reads examples, rather than draws them.
bool reads(const json& config) {
  const json task = value_at(config, "/task/name");
  return task.is_string() && !tasks::is_generated(task.get<std::string>());
}

void check_presence(const fs::path& folder, const json& config) {
  const bool pieces = reads(config) && value_at(config, "/task/tokens") == "pieces";
  for (const char* name : kFiles) {
    if (fs::exists(folder / name) || (kExportTokenizer == std::string_view(name) && !pieces))
      continue;
    fail(folder / name, "is missing; copy the export again");
  }
}

// Eight hexadecimal digits.
std::string checksum(const fs::path& path) {
  const tasks::MappedFile file(path);
  const std::string_view bytes = file.bytes();
  const auto* data = reinterpret_cast<const Bytef*>(bytes.data());
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08lx", ::crc32_z(0, data, bytes.size()));
  return digits;
}

void check_files(const fs::path& folder, const json& config) {
  const auto written = config.find(kExportChecksums);
  if (written == config.end()) return;
  for (const char* name : kFiles) {
    const fs::path path = folder / name;
    const json expected = written->is_object() ? written->value(name, json()) : json();
    if (expected.is_null() && !fs::exists(path)) continue;
    if (!expected.is_string()) {
      fail(folder / kExportConfig, std::string(kExportChecksums) + " has no checksum of " + name +
                                       "; export the run again");
    }
    const std::string found = checksum(path);
    if (found != expected.get<std::string>()) {
      fail(path, "is damaged or of another export: its CRC-32 is " + found + ", config.json says " +
                     expected.get<std::string>() + "; copy the export again");
    }
  }
}

void check_types(const fs::path& path, const json& config, const models::SafeTensors& file) {
  const json word = config.value("dtype", json());
  const auto type = export_type(word.is_string() ? word.get<std::string>() : "");
  if (!type) fail(path, "dtype is missing or not one of float32, bf16, fp16; export the run again");
  for (const auto& [name, tensor] : file.tensors) {
    if (tensor.dim() < 2 || tensor.scalar_type() == *type) continue;
    fail(path, "dtype is " + word.get<std::string>() + ", but " + name + " of " + kExportModel +
                   " has type " + at::toString(tensor.scalar_type()));
  }
}

void check_rows(const fs::path& path, const models::SafeTensors& file, const std::string& name,
                const std::string& key, int64_t said) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end() || found->second.dim() != 2) return;  // is refused when loaded
  const int64_t rows = found->second.size(0);
  if (rows == said) return;
  fail(path, key + " is " + std::to_string(said) + ", but " + name + " of " + kExportModel +
                 " has " + std::to_string(rows) + " rows");
}

// Sequences are as long as the task cuts them, where it reads some, and no longer than the model.
void check_length(const fs::path& path, const json& config, int64_t length) {
  const json expected = value_at(config, "/task/length"),
             longest = value_at(config, "/model/max_length");
  const std::string says = "info.max_length is " + std::to_string(length) + ", but ";
  if (reads(config) && expected.is_number() && expected != length) {
    fail(path, says + "task.length is " + expected.dump());
  }
  if (longest.is_number() && longest < length) {
    fail(path, says + "model.max_length is " + longest.dump());
  }
}

}  // namespace

std::optional<at::ScalarType> export_type(const std::string& word) {
  for (const TypeName& known : kTypes) {
    if (word == known.word) return known.type;
  }
  return std::nullopt;
}

std::map<std::string, std::string> export_checksums(const fs::path& folder) {
  std::map<std::string, std::string> checksums;
  for (const char* name : kFiles) {
    if (fs::exists(folder / name)) checksums[name] = checksum(folder / name);
  }
  return checksums;
}

void check_export(const fs::path& folder, const tasks::TaskInfo& info) {
  const fs::path path = folder / kExportConfig;
  const json config = json::parse(models::read_text(path));
  check_presence(folder, config);
  check_files(folder, config);
  const models::SafeTensors file = models::load_safetensors(folder / kExportModel);
  check_types(path, config, file);
  check_rows(path, file, "embedding.weight", "info.vocab", info.vocab);
  if (info.model == tasks::ModelKind::kClassifier) {
    check_rows(path, file, "output.weight", "info.classes", info.classes);
  }
  check_length(path, config, info.max_length);
}

}  // namespace sinkhorn::train
