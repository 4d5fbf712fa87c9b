// What the command lines of the commands that use a run have in common.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "cli/config.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace sinkhorn::cli {

// A run carries its own configuration; throws UsageError for a folder that holds none, and for keys
// that its task has no use for.
train::RunConfig read_run_config(const std::filesystem::path& run, const Overrides& overrides);

// --section.key options for commands that only decode, or only write the model down, which would
// not look at other keys; collected in the result.
std::shared_ptr<Overrides> add_decoding_key_options(CLI::App& command);
std::shared_ptr<Overrides> add_export_key_options(CLI::App& command);

// --device and --precision, short for keys of the section train.
void add_device_options(CLI::App& command, const std::shared_ptr<Overrides>& overrides);

// Checks counts, and says so in words: the bounds that CLI11 names are those of a double.
CLI::Validator at_least(int64_t least);
CLI::Validator is_number();  // and not "nan", which lies in every range

// What is used: RUN, and which of its checkpoints.
void add_run_argument(CLI::App& command, std::filesystem::path& run);
void add_checkpoint_option(CLI::App& command, std::string& checkpoint);

}  // namespace sinkhorn::cli
