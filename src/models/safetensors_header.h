// What the header of a safetensors file says, checked against the file it stands in. No Torch here:
// this is the part that reads what strangers wrote, and the sanitizers run it alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sinkhorn::models {

inline constexpr const char* kMetadataName = "__metadata__";
inline constexpr uint64_t kLengthSize = 8;               // of the header's length, before it
inline constexpr uint64_t kLargestHeader = 100'000'000;  // as in the reference implementation

struct StoredType {
  const char* name;
  uint64_t size;  // of an element, in bytes
};
inline constexpr StoredType kStoredTypes[] = {
    {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
    {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1},   {"BOOL", 1},
};

struct StoredTensor {
  std::string name;
  size_t type = 0;  // a place in kStoredTypes
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes of the file
};

struct StoredTensors {
  std::vector<StoredTensor> tensors;  // in order of their bytes; they tile the rest of the file
  std::map<std::string, std::string> metadata;
};

// Throws Error, with the path and what is wrong in one line, for anything but a whole and sound
// file. `file`: all of its bytes; `path`: what to call it.
StoredTensors read_safetensors_header(std::string_view file, const std::filesystem::path& path);

// A name out of a file as a message shows it: short, and on one line.
std::string quoted_tensor(const std::string& name);

}  // namespace sinkhorn::models
