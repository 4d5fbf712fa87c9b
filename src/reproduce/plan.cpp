#include "reproduce/plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "sinkhorn/error.h"
#include "tasks/files.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kTrialShare = 4;  // a trial has a quarter of the steps

// Where things lie, what is shown and saved when, and the seed.
const std::vector<std::string> kPassing = {"task.cache",       "task.tokenizer",   "train.run",
                                           "train.device",     "train.threads",    "train.seed",
                                           "train.log_every",  "train.save_every", "train.keep",
                                           "train.eval_every", "train.graph"};

bool among(const std::string& word, const std::vector<std::string>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// The publisher's folder in --data, or --data itself where that is the folder, and the part of it
// that is configured: data/PUBLISHED[/PART]. No other: the columns of a table differ by their data
// sets, and one must not stand in for another.
std::string data_folder(const fs::path& given, const std::string& configured) {
  if (given.empty() || configured.empty()) return configured;
  const fs::path path = configured;
  const fs::path part = *path.begin() == "data" ? path.lexically_relative("data") : path.filename();
  const fs::path place = given.filename().empty() ? given.parent_path() : given;  // a last slash
  return ((place.filename() == *part.begin() ? place.parent_path() : place) / part).string();
}

std::string unquoted(std::string value) {
  std::erase(value, '"');
  return value;
}

// The last name of a path.
std::string dataset_of(std::string path) {
  while (path.ends_with('/')) path.pop_back();
  return fs::path(path).filename().string();
}

// The words that say something of a stack of that kind, beside its kind and tie_kv.
std::vector<std::string> words_of(const std::string& kind, const std::string& sort_net) {
  if (kind == "full") return {};
  if (kind == "local") return {"block"};
  if (kind == "window") return {"block", "window"};
  if (kind == "sparse") return {"stride", "summary", "merged"};
  std::vector<std::string> words = {"block",       "sort_net", "pooling", "iterations",
                                    "temperature", "gumbel",   "columns"};
  if (sort_net != "bilinear") words.push_back("max_blocks");
  if (kind == "sortcut") {
    words.push_back("budget");
  } else {
    words.insert(words.end(), {"window", "causal", "combine"});
  }
  return words;
}

// Whether a key has a say in what the configuration trains: a default that changes for others
// must not make a finished row another one.
bool in_effect(const std::map<std::string, std::string>& keys, const std::string& key) {
  const auto value = [&](const std::string& of) {
    return keys.contains(of) ? keys.at(of) : std::string();
  };
  if (among(key, kPassing)) return false;
  const std::string section = key.substr(0, key.find('.')), word = key.substr(section.size() + 1);
  const std::string task = value("task.name");
  if (section == "encoder" || section == "decoder") {
    if (section == "encoder" ? !tasks::has_encoder(task) : !tasks::has_decoder(task)) return false;
    if (word == "causal" && section == "encoder") return false;
    if (word == "kind" || word == "tie_kv") return true;
    return among(word, words_of(value(section + ".kind"), value(section + ".sort_net")));
  }
  const auto is_of_another = [&](const std::string& name) {
    return key.starts_with("task." + name + "_") && task != name;
  };
  return std::none_of(tasks::task_names().begin(), tasks::task_names().end(), is_of_another);
}

// The same course of training in a quarter of the steps. Schedules that follow the step itself
// would reach a higher rate by a shorter warm-up.
void shorten(train::RunConfig& config) {
  train::OptimizerConfig& optimizer = config.optimizer;
  config.train.steps = std::max<int64_t>(1, config.train.steps / kTrialShare);
  if (optimizer.warmup > 0) optimizer.warmup = std::max<int64_t>(1, optimizer.warmup / kTrialShare);
  if (optimizer.schedule == "noam" || optimizer.schedule == "rsqrt") {
    optimizer.rate /= std::sqrt(static_cast<double>(kTrialShare));
  }
}

}  // namespace

bool sorts(const train::RunConfig& config) {
  return (tasks::has_encoder(config.task.name) && nn::sorts(config.model.encoder)) ||
         (tasks::has_decoder(config.task.name) && nn::sorts(config.model.decoder));
}

std::string config_hash(const std::string& text) {
  std::map<std::string, std::string> keys;
  std::string line, section;
  for (std::istringstream lines(text); std::getline(lines, line);) {
    if (line.starts_with("[")) section = line.substr(1, line.find(']') - 1);
    const size_t equals = line.find(" = ");
    if (equals != std::string::npos) {
      keys[section + "." + line.substr(0, equals)] = unquoted(line.substr(equals + 3));
    }
  }
  // The publisher's folder by name, wherever it lies.
  if (!keys["task.data"].empty()) keys["task.data"] = dataset_of(keys["task.data"]);
  tasks::Key hash;
  for (const auto& [key, value] : keys) {
    if (in_effect(keys, key) && !value.empty()) hash.add(key).add(value);
  }
  return hash.hex().substr(0, 16);
}

Planner::Planner(const Table& table, const Options& options, ConfigLanguage language)
    : table_(table), options_(options), language_(std::move(language)) {
  for (const std::string& name : options.rows) {
    const auto is_it = [&](const Row& row) { return row.id == name || row.name == name; };
    if (std::any_of(table.rows.begin(), table.rows.end(), is_it)) continue;
    std::vector<std::string> ids;
    for (const Row& row : table.rows) ids.push_back(row.id);
    throw UsageError("--rows: " + table.name + " has no row \"" + name + "\"; it has " +
                     tasks::join(ids));
  }
  for (const std::string& name : options.variants) {
    std::vector<std::string> names;
    for (const Variant& variant : table.variants) names.push_back(variant.name);
    if (among(name, names)) continue;
    throw UsageError("--variants: " + table.name + " has no variant \"" + name + "\"; it has " +
                     (names == std::vector<std::string>{""} ? "none" : tasks::join(names)));
  }
  for (size_t row = 0; row < table.rows.size(); ++row) {
    for (size_t variant = 0; variant < table.variants.size(); ++variant) {
      if (!trains(table.rows[row], table.variants[variant])) continue;
      configs_[{row, variant}] = language_.read(
          layers(table, table.rows[row], table.variants[variant], options.scale), {});
    }
  }
}

bool Planner::wants(const Row& row, const Variant& variant) const {
  if (row.config.empty()) return false;
  if (!options_.variants.empty() && !among(variant.name, options_.variants)) return false;
  if (!options_.rows.empty()) return among(row.id, options_.rows) || among(row.name, options_.rows);
  return row.role != "literal" || options_.preset == "paper";
}

bool Planner::trains(const Row& row, const Variant& variant) const {
  return !row.config.empty() && among(options_.scale, variant.scales);
}

fs::path Planner::folder(size_t row, size_t variant) const {
  const std::string& of = table_.variants[variant].name;
  return options_.out / table_.name / options_.scale /
         (table_.rows[row].id + (of.empty() ? "" : "." + of));
}

Run Planner::make(size_t row, size_t variant, const fs::path& folder, int64_t seed,
                  const std::optional<Picks>& picks) const {
  Run run{row, variant, seed, folder, configs_.at({row, variant}), {}, false, {}, picks};
  train::RunConfig& config = run.config;
  run.dataset = fs::path(config.task.data).filename().string();
  config.task.data = data_folder(options_.data, config.task.data);
  config.train.run = folder.string();
  config.train.seed = static_cast<uint64_t>(seed);
  if (options_.device != "auto") config.train.device = options_.device;
  for (nn::AttentionConfig* stack : {&config.model.encoder, &config.model.decoder}) {
    if (!picks) break;
    stack->temperature = picks->temperature;
    stack->iterations = picks->iterations;
  }
  run.leaks = tasks::has_decoder(config.task.name) && nn::leaks_future(config.model.decoder);
  run.hash = config_hash(language_.write(config));
  return run;
}

Run Planner::run(size_t row, size_t variant, int64_t seed,
                 const std::optional<Picks>& picks) const {
  const std::string name = (picks ? "tuned-seed" : "seed") + std::to_string(seed);
  return make(row, variant, folder(row, variant) / name, seed, picks);
}

Run Planner::trial(size_t row, size_t variant, const std::string& name, const Picks& picks) const {
  Run run = make(row, variant, folder(row, variant) / "tune" / name, 1, picks);
  shorten(run.config);
  run.config.task.valid = "train";    // what is chosen here is tested elsewhere
  run.config.train.eval_every = 0;    // and by its end alone
  run.config.train.test_batches = 1;  // which nobody looks at
  run.config.train.greedy = false;
  run.hash = config_hash(language_.write(run.config));
  return run;
}

void refuse_what_trains(const Table& table, const Options& options) {
  const std::pair<const char*, bool> given[] = {{"--rows", !options.rows.empty()},
                                                {"--variants", !options.variants.empty()},
                                                {"--seeds", options.seeds > 1},
                                                {"--tune", options.tune}};
  for (const auto& [option, is_given] : given) {
    if (!is_given) continue;
    throw UsageError(std::string(option) + ": " + table.name +
                     " trains nothing that it could apply to; leave it out");
  }
}

}  // namespace sinkhorn::reproduce
