// A run's configuration in a few words, for a reader of reports.
#pragma once

#include <filesystem>
#include <string>

#include "train/config.h"

namespace sinkhorn::cli {

std::string task_words(const tasks::TaskConfig& task);  // "sort: 10 symbols, lists of up to 48"
std::string attention_words(const train::RunConfig& config);  // "sinkhorn, blocks of 8"
// What it was trained on, as far as its environment.json tells.
std::string device_words(const std::filesystem::path& run, const std::string& device);
std::string figure_words(double value);  // "1.6352", and of what is huge as few digits
// Whether the paper's literal columns show the decoder its future.
bool leaks_future(const train::RunConfig& config);

}  // namespace sinkhorn::cli
