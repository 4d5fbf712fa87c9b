// Whether the files of an export are the ones that were written, and its description is theirs.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "tasks/task.h"

namespace sinkhorn::train {

// The type of matrices that a word for it means: float32, bf16, fp16.
std::optional<at::ScalarType> export_type(const std::string& word);

// Under kExportChecksums config.json keeps the CRC-32 of each file beside it, by name.
inline constexpr char kExportChecksums[] = "crc32";
std::map<std::string, std::string> export_checksums(const std::filesystem::path& folder);

// Throws Error, with the file and what is wrong, where a file is missing or is not the one that was
// written, or where config.json says something else than the tensors. Reads every byte. An export
// without checksums is an older one: its bytes are taken as they are.
void check_export(const std::filesystem::path& folder, const tasks::TaskInfo& info);

}  // namespace sinkhorn::train
