// What the command lines of the commands that use a run have in common.
#pragma once

#include <filesystem>
#include <memory>

#include "cli/config.h"

namespace CLI {
class App;
}

namespace sinkhorn::cli {

// A run carries its own configuration; throws UsageError for a folder that holds none.
train::RunConfig read_run_config(const std::filesystem::path& run, const Overrides& overrides);

// --section.key options for what may change after training, collected in the result.
std::shared_ptr<Overrides> add_run_key_options(CLI::App& command);

// The same for commands that only decode, which would not look at the others.
std::shared_ptr<Overrides> add_decoding_key_options(CLI::App& command);

// --device and --precision, short for keys of the section train.
void add_device_options(CLI::App& command, const std::shared_ptr<Overrides>& overrides);

inline constexpr const char* kCheckpointHelp = "newest, best, or a checkpoint file";

}  // namespace sinkhorn::cli
