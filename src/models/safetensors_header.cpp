#include "models/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "sinkhorn/error.h"

namespace sinkhorn::models {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMostDimensions = 64;  // as in ATen's loops

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw Error(path.string() + ": " + what);
}

std::string printable(const std::string& text) {
  constexpr size_t kMost = 80;
  std::string shown = text.size() > kMost ? text.substr(0, kMost) + "..." : text;
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  return shown;
}

uint64_t header_length(const fs::path& path, std::string_view file) {
  if (file.size() < kLengthSize) {
    fail(path, std::to_string(file.size()) + " bytes, expected at least 8: not a safetensors file");
  }
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthSize);
  if (length > kLargestHeader || length > file.size() - kLengthSize) {
    fail(path, "a header of " + std::to_string(length) + " bytes in a file of " +
                   std::to_string(file.size()) + ": truncated, or not a safetensors file");
  }
  return length;
}

json parse_header(const fs::path& path, std::string_view text) {
  std::set<std::string> names;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::array_start || event == json::parse_event_t::object_start) {
      if (depth > 2) fail(path, "the header is nested too deeply: not a safetensors file");
    } else if (event == json::parse_event_t::key && depth == 1) {
      const auto name = value.get<std::string>();
      if (!names.insert(name).second) {
        fail(path, quoted_tensor(name) + " appears twice in the header");
      }
    }
    return true;
  };
  json header = json::parse(text, check, /*allow_exceptions=*/false);
  if (!header.is_object()) {
    fail(path, "the header is not a JSON object: damaged, or not a safetensors file");
  }
  return header;
}

std::map<std::string, std::string> parse_metadata(const fs::path& path, const json& value) {
  if (!value.is_object()) fail(path, "__metadata__ is not an object of strings");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) fail(path, "__metadata__ '" + printable(key) + "' is not a string");
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

// The integers of an array, each at most `largest`.
std::vector<uint64_t> parse_integers(const fs::path& path, const std::string& name,
                                     const json& value, const char* field, uint64_t largest) {
  const auto found = value.find(field);
  const auto is_integer = [&](const json& item) {
    return item.is_number_unsigned() && item.get<uint64_t>() <= largest;
  };
  if (found == value.end() || !found->is_array() ||
      !std::all_of(found->begin(), found->end(), is_integer)) {
    fail(path, quoted_tensor(name) + ": " + field + " is not an array of sizes within the file");
  }
  return found->get<std::vector<uint64_t>>();
}

size_t parse_type(const fs::path& path, const std::string& name, const json& value) {
  const auto found = value.find("dtype");
  if (found == value.end() || !found->is_string())
    fail(path, quoted_tensor(name) + " has no dtype");
  const auto word = found->get<std::string>();
  std::string known_names;
  for (size_t i = 0; i < std::size(kStoredTypes); ++i) {
    if (word == kStoredTypes[i].name) return i;
    known_names += std::string(" ") + kStoredTypes[i].name;
  }
  fail(path, quoted_tensor(name) + ": dtype '" + printable(word) + "' is not one of" + known_names);
}

// Bytes that the shape needs; throws where they, or the strides, do not fit into 63 bits.
uint64_t bytes_of(const fs::path& path, const StoredTensor& tensor) {
  int64_t bytes = static_cast<int64_t>(kStoredTypes[tensor.type].size);
  bool empty = false;
  for (const int64_t size : tensor.shape) {
    empty = empty || size == 0;
    // Strides of an empty tensor are products of its other sizes, so these must fit as well.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      fail(path, quoted_tensor(tensor.name) + ": the shape is too large");
    }
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

StoredTensor parse_tensor(const fs::path& path, const std::string& name, const json& value,
                          uint64_t data_size) {
  if (!value.is_object()) fail(path, quoted_tensor(name) + " is not described by an object");
  StoredTensor tensor{name, parse_type(path, name, value), {}, 0, 0};
  const auto offsets = parse_integers(path, name, value, "data_offsets", data_size);
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    fail(path, quoted_tensor(name) + ": data_offsets is not [begin, end]");
  }
  tensor.begin = offsets[0];
  tensor.end = offsets[1];
  const auto shape = parse_integers(path, name, value, "shape", INT64_MAX);
  if (shape.size() > kMostDimensions) fail(path, quoted_tensor(name) + " has over 64 dimensions");
  tensor.shape.assign(shape.begin(), shape.end());
  const uint64_t bytes = bytes_of(path, tensor);
  if (tensor.end - tensor.begin != bytes) {
    fail(path, quoted_tensor(name) + " takes " + std::to_string(tensor.end - tensor.begin) +
                   " bytes, but its shape and dtype need " + std::to_string(bytes));
  }
  return tensor;
}

// Tensors must tile the data: with bytes that belong to none, the file is not what was saved.
void check_cover(const fs::path& path, std::vector<StoredTensor>& tensors, uint64_t data_size) {
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != covered) {
      fail(path, quoted_tensor(tensor.name) + " begins at " + std::to_string(tensor.begin) +
                     ", expected " + std::to_string(covered) + ": tensors overlap or leave a gap");
    }
    covered = tensor.end;
  }
  if (covered != data_size) {
    fail(path, std::to_string(data_size) + " bytes of data, but the header describes " +
                   std::to_string(covered));
  }
}

}  // namespace

std::string quoted_tensor(const std::string& name) { return "tensor '" + printable(name) + "'"; }

StoredTensors read_safetensors_header(std::string_view file, const fs::path& path) {
  const uint64_t length = header_length(path, file);
  const json header = parse_header(path, file.substr(kLengthSize, length));
  const uint64_t data = kLengthSize + length, data_size = file.size() - data;
  StoredTensors read;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadataName) {
      read.metadata = parse_metadata(path, value);
    } else {
      read.tensors.push_back(parse_tensor(path, name, value, data_size));
    }
  }
  check_cover(path, read.tensors, data_size);
  for (StoredTensor& tensor : read.tensors) {
    tensor.begin += data;
    tensor.end += data;
  }
  return read;
}

}  // namespace sinkhorn::models
