#include "cli/run_words.h"

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "models/files.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

std::string stack_words(const nn::AttentionConfig& attention) {
  std::string words = attention.kind;
  if (attention.kind == "sparse") return words + ", stride " + std::to_string(attention.stride);
  if (attention.kind != "full") words += ", blocks of " + std::to_string(attention.block);
  if (attention.kind == "sortcut") words += ", budget " + std::to_string(attention.budget);
  if (attention.window > 0) words += ", window " + std::to_string(attention.window);
  return words;
}

}  // namespace

std::string figure_words(double value) {
  char text[32];
  std::snprintf(text, sizeof text, std::abs(value) < 1e7 ? "%.4f" : "%.4g", value);
  return text;
}

std::string task_words(const tasks::TaskConfig& task) {
  if (task.name == "sort") {
    return "sort: " + std::to_string(task.sort_symbols) + " symbols, lists of up to " +
           std::to_string(task.sort_train_max) +
           (task.sort_test_max != task.sort_train_max
                ? " (test: " + std::to_string(task.sort_test_max) + ")"
                : "");
  }
  std::string words = task.name;
  if (task.name == "recall") words += ": " + std::to_string(task.recall_pairs) + " pairs";
  if (!task.data.empty()) words += ": " + fs::path(task.data).filename().string();
  if (task.length > 0) words += ", " + std::to_string(task.length) + " tokens";
  return words;
}

std::string attention_words(const train::RunConfig& config) {
  const std::string encoder = stack_words(config.model.encoder);
  const std::string decoder = stack_words(config.model.decoder);
  if (!tasks::has_decoder(config.task.name)) return encoder;
  if (!tasks::has_encoder(config.task.name) || encoder == decoder) return decoder;
  return "encoder " + encoder + "; decoder " + decoder;
}

std::string device_words(const fs::path& run, const std::string& device) {
  const auto facts = nlohmann::json::parse(models::read_text(run / "environment.json"), nullptr,
                                           /*allow_exceptions=*/false);
  if (!facts.is_object()) return device;
  const std::string gpu = device.starts_with("cuda:") ? device : "cuda:0";
  if (!device.starts_with("cpu") && facts.contains(gpu)) return facts.value(gpu, device);
  return "CPU";
}

bool leaks_future(const train::RunConfig& config) {
  return tasks::has_decoder(config.task.name) && nn::leaks_future(config.model.decoder);
}

}  // namespace sinkhorn::cli
