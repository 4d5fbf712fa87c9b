// What the files of a run are called (run_folder.h says what they hold), and what a folder has of
// them. No Torch in this header.
#pragma once

#include <filesystem>

namespace sinkhorn::train {

inline constexpr char kRunConfig[] = "config.ini", kRunTask[] = "task.json",
                      kRunTokenizer[] = "tokenizer.model", kRunLog[] = "log.jsonl",
                      kRunResult[] = "result.json", kCheckpoints[] = "checkpoints";

// Whether a run in this folder can be resumed: it has come to a checkpoint.
bool has_checkpoint(const std::filesystem::path& run);

}  // namespace sinkhorn::train
