// The format: uint64 little-endian n; n bytes of JSON, padded with spaces to a multiple of 8;
// the data. The JSON maps a name to {"dtype", "shape", "data_offsets": [begin, end)} relative to
// the data, and "__metadata__" to an object of strings. Tensors cover the data without gap or
// overlap.
#include "sinkhorn/models/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>

#include "models/files.h"
#include "sinkhorn/error.h"

namespace sinkhorn::models {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr uint64_t kLengthSize = 8;
constexpr uint64_t kLargestHeader = 100'000'000;  // as in the reference implementation
constexpr size_t kMostDimensions = 64;            // as in ATen's loops
constexpr const char* kMetadata = "__metadata__";

struct NamedType {
  const char* name;
  at::ScalarType type;
};
constexpr NamedType kTypes[] = {
    {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
    {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
    {"U8", at::kByte},    {"BOOL", at::kBool},
};

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw Error(path.string() + ": " + what);
}

std::string quoted(const std::string& name) { return "tensor '" + name + "'"; }

// Refuses what the format cannot hold, before anything is written.
const char* type_name(const fs::path& path, const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) {
    fail(path, quoted(name) + " is not a dense tensor and cannot be saved");
  }
  for (const NamedType& known : kTypes) {
    if (known.type == tensor.scalar_type()) return known.name;
  }
  fail(path, quoted(name) + " has type " + at::toString(tensor.scalar_type()) +
                 ", which cannot be saved");
}

std::string header_of(const fs::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  json header = json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (name == kMetadata || header.contains(name)) {
      fail(path, quoted(name) + ": the name is taken, names must differ");
    }
    const uint64_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", type_name(path, name, tensor)},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    fail(path, "a name or the metadata is not valid UTF-8 and cannot be saved");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kLargestHeader) fail(path, "too many names: the header would exceed 100 MB");
  return text;
}

}  // namespace

void save_safetensors(const fs::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  for (const auto& [name, tensor] : tensors) type_name(path, name, tensor);
  // Wide elements first, so that every tensor lies aligned and loading copies nothing.
  NamedTensors ordered = tensors;
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  const std::string header = header_of(path, ordered, metadata);
  const uint64_t length = header.size();
  AtomicFile file(path);
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : ordered) {
    const at::Tensor bytes = tensor.detach().cpu().contiguous();  // one copy at a time, if any
    file.write(bytes.const_data_ptr(), bytes.nbytes());
  }
  file.commit();
}

namespace {

// The whole file, mapped; a write to it stays in memory and never reaches the file.
class Mapping {
 public:
  explicit Mapping(const fs::path& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status{};
    if (descriptor < 0 || ::fstat(descriptor, &status) != 0) fail_system(path, descriptor);
    if (!S_ISREG(status.st_mode)) {
      ::close(descriptor);
      fail(path, "not a regular file, expected a safetensors file");
    }
    size_ = static_cast<uint64_t>(status.st_size);
    if (size_ > 0) {  // nothing cannot be mapped
      data_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                     descriptor, 0);
      if (data_ == MAP_FAILED) fail_system(path, descriptor);
    }
    ::close(descriptor);
  }
  ~Mapping() {
    if (size_ > 0) ::munmap(data_, size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  uint64_t size() const { return size_; }

 private:
  [[noreturn]] static void fail_system(const fs::path& path, int descriptor) {
    const std::string reason = std::generic_category().message(errno);
    if (descriptor >= 0) ::close(descriptor);
    fail(path, "cannot read: " + reason);
  }

  void* data_ = nullptr;
  uint64_t size_ = 0;
};

// What the header says of one tensor, checked by itself.
struct Entry {
  std::string name;
  at::ScalarType type = at::kFloat;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

uint64_t header_length(const fs::path& path, const Mapping& file) {
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
      if (!names.insert(name).second) fail(path, quoted(name) + " appears twice in the header");
    }
    return true;
  };
  json header = json::parse(text, check, /*allow_exceptions=*/false);
  if (!header.is_object()) {
    fail(path, "the header is not a JSON object: damaged, or not a safetensors file");
  }
  return header;
}

Metadata parse_metadata(const fs::path& path, const json& value) {
  if (!value.is_object()) fail(path, "__metadata__ is not an object of strings");
  Metadata metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) fail(path, "__metadata__ '" + key + "' is not a string");
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
    fail(path, quoted(name) + ": " + field + " is not an array of sizes");
  }
  return found->get<std::vector<uint64_t>>();
}

at::ScalarType parse_type(const fs::path& path, const std::string& name, const json& value) {
  const auto found = value.find("dtype");
  if (found == value.end() || !found->is_string()) fail(path, quoted(name) + " has no dtype");
  const auto word = found->get<std::string>();
  std::string known_names;
  for (const NamedType& known : kTypes) {
    if (word == known.name) return known.type;
    known_names += std::string(" ") + known.name;
  }
  fail(path, quoted(name) + ": dtype '" + word + "' is not one of" + known_names);
}

Entry parse_entry(const fs::path& path, const std::string& name, const json& value,
                  uint64_t data_size) {
  if (!value.is_object()) fail(path, quoted(name) + " is not described by an object");
  Entry entry{name, parse_type(path, name, value), {}, 0, 0};
  const auto offsets = parse_integers(path, name, value, "data_offsets", data_size);
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    fail(path, quoted(name) + ": data_offsets is not [begin, end]");
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];

  const auto shape = parse_integers(path, name, value, "shape", INT64_MAX);
  if (shape.size() > kMostDimensions) fail(path, quoted(name) + " has over 64 dimensions");
  entry.shape.assign(shape.begin(), shape.end());
  int64_t bytes = static_cast<int64_t>(at::elementSize(entry.type));
  bool empty = false;
  for (const int64_t size : entry.shape) {
    empty = empty || size == 0;
    // Strides of an empty tensor are products of its other sizes, so these must fit as well.
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      fail(path, quoted(name) + ": the shape is too large");
    }
  }
  if (empty) bytes = 0;
  if (entry.end - entry.begin != static_cast<uint64_t>(bytes)) {
    fail(path, quoted(name) + " takes " + std::to_string(entry.end - entry.begin) +
                   " bytes, but its shape and dtype need " + std::to_string(bytes));
  }
  return entry;
}

// Tensors must tile the data: with bytes that belong to none, the file is not what was saved.
void check_cover(const fs::path& path, std::vector<Entry>& entries, uint64_t data_size) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != covered) {
      fail(path, quoted(entry.name) + " begins at " + std::to_string(entry.begin) + ", expected " +
                     std::to_string(covered) + ": tensors overlap or leave a gap");
    }
    covered = entry.end;
  }
  if (covered != data_size) {
    fail(path, std::to_string(data_size) + " bytes of data, but the header describes " +
                   std::to_string(covered));
  }
}

at::Tensor tensor_of(const Entry& entry, char* data, const std::shared_ptr<Mapping>& file) {
  if (entry.begin == entry.end) return at::empty(entry.shape, entry.type);
  if (reinterpret_cast<uintptr_t>(data) % at::elementSize(entry.type) != 0) {
    at::Tensor copy = at::empty(entry.shape, entry.type);
    std::memcpy(copy.mutable_data_ptr(), data, entry.end - entry.begin);
    return copy;
  }
  return at::from_blob(data, entry.shape, [file](void*) {}, at::TensorOptions(entry.type));
}

}  // namespace

SafeTensors load_safetensors(const fs::path& path) {
  const auto file = std::make_shared<Mapping>(path);
  const uint64_t length = header_length(path, *file);
  const json header = parse_header(path, {file->data() + kLengthSize, length});
  char* const data = file->data() + kLengthSize + length;
  const uint64_t data_size = file->size() - kLengthSize - length;

  SafeTensors loaded;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name == kMetadata) {
      loaded.metadata = parse_metadata(path, value);
    } else {
      entries.push_back(parse_entry(path, name, value, data_size));
    }
  }
  check_cover(path, entries, data_size);
  for (const Entry& entry : entries) {
    loaded.tensors[entry.name] = tensor_of(entry, data + entry.begin, file);
  }
  return loaded;
}

}  // namespace sinkhorn::models
