#include "cli/config.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "cli/fields.h"
#include "cli/settings.h"
#include "sinkhorn/error.h"

namespace sinkhorn::cli {
namespace {

void set_fields(const Settings& settings, const Fields& fields) {
  for (const Field& field : fields) {
    if (const auto found = settings.find(field.key); found != settings.end()) {
      field.set(found->second.value, found->second.name);
    }
  }
}

// The model before its keys: a named size, and each stack at its preset.
models::ModelConfig model_defaults(const Choices& choices, bool classifies) {
  models::ModelConfig model =
      choices.size.empty() ? models::ModelConfig{} : models::model_size(choices.size);
  model.max_length = 0;  // the task knows
  for (const bool decoder : {false, true}) {
    const std::string& preset = decoder ? choices.decoder_preset : choices.encoder_preset;
    nn::AttentionConfig& stack = decoder ? model.decoder : model.encoder;
    stack =
        nn::attention_preset(preset.empty() ? "default" : preset, decoder, classifies && !decoder);
  }
  return model;
}

// The paper's optimizers for its sizes. Numbers follow the name and the schedule, so that a stated
// schedule never meets the rate of another.
train::OptimizerConfig optimizer_defaults(const std::string& size, const Settings& settings) {
  train::OptimizerConfig named;
  if (!size.empty()) named.clip = 0;  // the paper's sizes are trained without
  if (size == "tiny" || size == "base") {
    named.name = "adam";
    named.schedule = "noam";
  } else if (!size.empty()) {
    named.name = "adafactor";
    named.schedule = "rsqrt";
  }
  train::RunConfig stated;
  stated.optimizer = named;
  set_fields(settings, run_fields(stated));
  named.name = stated.optimizer.name;
  named.schedule = stated.optimizer.schedule;
  if (named.name == "adam") named.beta2 = 0.997;
  if (named.schedule == "noam") {
    named.rate = 1.0;
    named.warmup = 8000;
  } else if (named.schedule == "rsqrt") {
    named.rate = 1.0;
    named.warmup = 10000;
  }
  return named;
}

// How to speak of a key: by file and line where it was stated in one.
std::string name_of(const Settings& settings, const std::string& key) {
  const auto found = settings.find(key);
  return found == settings.end() ? key : found->second.name;
}

void check_heads(const models::ModelConfig& model, const Settings& settings) {
  if (model.width % model.heads == 0) return;
  const std::string width = std::to_string(model.width), heads = std::to_string(model.heads);
  if (settings.contains("model.width") && !settings.contains("model.heads")) {
    throw UsageError(settings.at("model.width").name + ": " + width + " is not shared evenly by " +
                     heads + " heads (model.heads)");
  }
  throw UsageError(name_of(settings, "model.heads") + ": " + heads +
                   " heads do not share model.width " + width + " evenly");
}

// What is wrong with a stack's attention is said of the key that was stated, if only as a preset.
void check_stack(const std::string& stack, const nn::AttentionConfig& config, bool decoder,
                 const Settings& settings) {
  try {
    nn::check_attention(config, decoder);
  } catch (const UsageError& error) {
    const std::string message = error.what();  // "attention: window ...", its key the first word
    const std::string reason = message.substr(message.find(' ') + 1);
    std::string key = reason.substr(0, reason.find(' '));
    if (key == "sortcut") key = "kind";
    for (const std::string& word : {key, std::string(key == "summary" ? "stride" : "preset")}) {
      const auto stated = settings.find(stack + "." + word);
      if (stated != settings.end()) throw UsageError(stated->second.name + ": " + reason);
    }
    throw UsageError(stack + " " + message);
  }
}

void check_device(const std::string& device, const Settings& settings) {
  const std::string prefix = "cuda:";
  const bool numbered = device.starts_with(prefix) && device.size() > prefix.size() &&
                        device.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
  if (numbered || device == "auto" || device == "cpu" || device == "cuda") return;
  throw UsageError(name_of(settings, "train.device") + ": \"" + device +
                   "\" is not one of auto, cpu, cuda, cuda:N");
}

// Where data is missing, that the task was chosen is what can be pointed at.
void check_data(const tasks::TaskConfig& task, const Settings& settings) {
  if (tasks::is_generated(task.name) || !task.data.empty()) return;
  const std::string chosen = "task.name", name = name_of(settings, chosen);
  throw UsageError(name.substr(0, name.size() - chosen.size()) + "task.data: the task " +
                   task.name + " needs the folder or file of its data");
}

// `settings`: what was stated, and where.
void check_stated(const train::RunConfig& config, const Settings& settings) {
  const models::ModelConfig& model = config.model;
  const std::string& task = config.task.name;
  check_heads(model, settings);
  if (tasks::has_encoder(task)) check_stack("encoder", model.encoder, false, settings);
  if (tasks::has_decoder(task)) check_stack("decoder", model.decoder, true, settings);
  check_device(config.train.device, settings);
  check_data(config.task, settings);
}

}  // namespace

train::RunConfig read_config(const std::filesystem::path& path, const Overrides& overrides) {
  return read_config(path.empty() ? std::vector<std::filesystem::path>{} : std::vector{path},
                     overrides);
}

train::RunConfig read_config(const std::vector<std::filesystem::path>& files,
                             const Overrides& overrides) {
  Settings settings = read_settings(overrides);
  // merge() keeps what is there: the command line's word, then the last file's.
  for (auto file = files.rbegin(); file != files.rend(); ++file) {
    settings.merge(read_settings(*file));
  }

  Choices choices;
  set_fields(settings, choice_fields(choices));
  train::RunConfig config;
  set_fields(settings, run_fields(config));  // a first time, for the words that move other defaults
  config.model = model_defaults(choices, !tasks::has_decoder(config.task.name));
  config.optimizer = optimizer_defaults(choices.size, settings);
  set_fields(settings, run_fields(config));
  // A run remembers what it was trained with, not that it took what was usual then.
  config.model.encoder = nn::resolve_attention(config.model.encoder, /*decoder=*/false);
  config.model.decoder = nn::resolve_attention(config.model.decoder, /*decoder=*/true);
  if (config.train.run.empty()) {
    const std::string name = files.empty() ? config.task.name : files[0].stem().string();
    config.train.run = "runs/" + name;
  }
  check_stated(config, settings);
  return config;
}

bool names_task(const std::filesystem::path& path, const Overrides& overrides) {
  const std::string key = "task.name";
  return read_settings(overrides).contains(key) || read_settings(path).contains(key);
}

void make_absolute(train::RunConfig& config) {
  for (std::string* path : {&config.task.data, &config.task.cache, &config.train.init}) {
    if (path->empty()) continue;
    std::filesystem::path whole = std::filesystem::absolute(*path).lexically_normal();
    if (whole.filename().empty() && whole != whole.root_path()) whole = whole.parent_path();
    if (is_writable(whole.string())) *path = whole.string();
  }
}

std::string write_config(const train::RunConfig& config) {
  train::RunConfig copy = config;
  std::ostringstream out;
  std::string section;
  for (const Field& field : run_fields(copy)) {
    if (field.section() != section) {
      out << (section.empty() ? "" : "\n") << "[" << field.section() << "]\n";
      section = field.section();
    }
    const bool is_text = std::holds_alternative<std::string*>(field.value);
    const char* quote = is_text ? "\"" : "";
    out << field.key.substr(section.size() + 1) << " = " << quote << field.get() << quote << "\n";
  }
  return out.str();
}

void check_config(const train::RunConfig& config) { check_stated(config, {}); }

std::vector<Key> config_keys() {
  Choices choices;
  train::RunConfig config;
  config.model = model_defaults(choices, /*classifies=*/false);
  Fields fields = choice_fields(choices);
  const Fields rest = run_fields(config);
  fields.insert(fields.end(), rest.begin(), rest.end());

  std::map<std::string, std::vector<Key>> sections;
  for (const Field& field : fields) {
    const Key key = {field.key, field.type(), field.get(), field.help};
    sections[key.section()].push_back(key);
  }
  sections["attention"] = sections["decoder"];
  for (Key& key : sections["attention"]) key.name.replace(0, key.name.find('.'), "attention");
  std::vector<Key> keys;
  for (const char* section :
       {"task", "model", "attention", "encoder", "decoder", "optimizer", "train"}) {
    keys.insert(keys.end(), sections[section].begin(), sections[section].end());
  }
  return keys;
}

}  // namespace sinkhorn::cli
