#include "train/task_info.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/files.h"
#include "sinkhorn/error.h"
#include "train/run_files.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

struct KindName {
  tasks::ModelKind kind;
  const char* name;
};
constexpr KindName kKinds[] = {{tasks::ModelKind::kLanguageModel, "language_model"},
                               {tasks::ModelKind::kSeq2Seq, "seq2seq"},
                               {tasks::ModelKind::kClassifier, "classifier"}};

std::string kind_name(tasks::ModelKind kind) {
  return std::find_if(std::begin(kKinds), std::end(kKinds),
                      [&](const KindName& k) { return k.kind == kind; })
      ->name;
}

// Reads the members of "info", each of a type of its own.
class InfoReader {
 public:
  InfoReader(const fs::path& path, const std::string& remedy) : path_(path), remedy_(remedy) {
    const json whole = json::parse(models::read_text(path), nullptr, /*allow_exceptions=*/false);
    if (!whole.is_object()) throw Error(path.string() + ": not a JSON object; " + remedy);
    const auto info = whole.find("info");
    if (info == whole.end() || !info->is_object()) fail("info", "an object");
    info_ = *info;
  }

  std::string text(const char* key) const {
    const json& value = find(key, "text");
    if (!value.is_string()) fail(key, "text");
    return value.get<std::string>();
  }
  int64_t count(const char* key) const { return number(key, int64_t{1} << 31); }
  // 0 where it is not written down: earlier versions did not.
  int64_t size(const char* key) const {
    return info_.contains(key) ? number(key, int64_t{1} << 62) : 0;
  }
  bool truth(const char* key) const {
    const json& value = find(key, "true or false");
    if (!value.is_boolean()) fail(key, "true or false");
    return value.get<bool>();
  }
  std::vector<std::string> texts(const char* key) const {
    const json& value = find(key, "a list of text");
    const auto is_text = [](const json& item) { return item.is_string(); };
    if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_text)) {
      fail(key, "a list of text");
    }
    return value.get<std::vector<std::string>>();
  }
  tasks::ModelKind kind() const {
    const std::string word = text("model");
    for (const KindName& known : kKinds) {
      if (word == known.name) return known.kind;
    }
    fail("model", "language_model, seq2seq or classifier");
  }

 private:
  int64_t number(const char* key, int64_t most) const {
    constexpr const char* kWanted = "a whole number of at least 0";
    const json& value = find(key, kWanted);
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(most)) {
      fail(key, kWanted);
    }
    return value.get<int64_t>();
  }
  const json& find(const char* key, const char* wanted) const {
    const auto found = info_.find(key);
    if (found == info_.end()) fail(key, wanted);
    return *found;
  }
  [[noreturn]] void fail(const char* key, const char* wanted) const {
    throw Error(path_.string() + ": info." + key + " is missing or is not " + wanted + "; " +
                remedy_);
  }

  fs::path path_;
  std::string remedy_;
  json info_;
};

}  // namespace

json task_info_json(const tasks::TaskInfo& info) {
  return {{"model", kind_name(info.model)},
          {"vocab", info.vocab},
          {"classes", info.classes},
          {"labels", info.labels},
          {"max_length", info.max_length},
          {"metric", info.metric},
          {"higher_is_better", info.higher_is_better},
          {"data", info.data_note},
          {"data_tokens", info.data_tokens}};
}

tasks::TaskInfo read_task_info(const fs::path& path, const std::string& remedy) {
  const InfoReader info(path, remedy);
  return {.model = info.kind(),
          .vocab = info.count("vocab"),
          .classes = info.count("classes"),
          .max_length = info.count("max_length"),
          .metric = info.text("metric"),
          .higher_is_better = info.truth("higher_is_better"),
          .labels = info.texts("labels"),
          .data_note = info.text("data"),
          .data_tokens = info.size("data_tokens")};
}

std::optional<tasks::TaskInfo> read_run_task(const fs::path& run) {
  const fs::path path = run / kRunTask;
  if (!fs::exists(path)) return std::nullopt;
  return read_task_info(path, "remove it, and the task is known by its data");
}

}  // namespace sinkhorn::train
