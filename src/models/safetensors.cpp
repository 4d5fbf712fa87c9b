// The format: uint64 little-endian n; n bytes of JSON, padded with spaces to a multiple of 8; the
// data. The JSON maps a name to {"dtype", "shape", "data_offsets": [begin, end)} relative to
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
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "models/files.h"
#include "models/safetensors_header.h"
#include "sinkhorn/error.h"

namespace sinkhorn::models {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

// In the order of kStoredTypes.
constexpr at::ScalarType kTorchTypes[] = {
    at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
    at::kInt,    at::kShort, at::kChar, at::kByte,     at::kBool,
};
static_assert(std::size(kTorchTypes) == std::size(kStoredTypes));

// Data begins at a multiple of this, as Torch's own memory does; the format asks for 8.
constexpr size_t kAlignment = 64;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw Error(path.string() + ": " + what);
}

// Refuses what the format cannot hold, before anything is written.
const char* type_name(const fs::path& path, const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) {
    fail(path, quoted_tensor(name) + " is not a dense tensor and cannot be saved");
  }
  for (size_t i = 0; i < std::size(kTorchTypes); ++i) {
    if (kTorchTypes[i] == tensor.scalar_type()) return kStoredTypes[i].name;
  }
  fail(path, quoted_tensor(name) + " has type " + at::toString(tensor.scalar_type()) +
                 ", which cannot be saved");
}

std::string header_of(const fs::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  json header = json::object();
  if (!metadata.empty()) header[kMetadataName] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (name == kMetadataName || header.contains(name)) {
      fail(path, quoted_tensor(name) + ": the name is taken, names must differ");
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
  const size_t end = (kLengthSize + text.size() + kAlignment - 1) / kAlignment * kAlignment;
  text.resize(end - kLengthSize, ' ');
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

// The whole file, mapped: pages are read when they are used and shared between processes; one that
// is written to becomes this process's own and never reaches the file.
class Mapping {
 public:
  explicit Mapping(const fs::path& path) {
    // O_NONBLOCK: a pipe is refused below rather than waited for.
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
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

at::Tensor tensor_of(const StoredTensor& stored, const std::shared_ptr<Mapping>& file) {
  const at::ScalarType type = kTorchTypes[stored.type];
  if (stored.begin == stored.end) return at::empty(stored.shape, type);
  char* const data = file->data() + stored.begin;
  if (reinterpret_cast<uintptr_t>(data) % at::elementSize(type) != 0) {
    at::Tensor copy = at::empty(stored.shape, type);
    std::memcpy(copy.mutable_data_ptr(), data, stored.end - stored.begin);
    return copy;
  }
  return at::from_blob(data, stored.shape, [file](void*) {}, at::TensorOptions(type));
}

}  // namespace

SafeTensors load_safetensors(const fs::path& path) {
  const auto file = std::make_shared<Mapping>(path);
  StoredTensors stored = read_safetensors_header({file->data(), file->size()}, path);
  SafeTensors loaded;
  loaded.metadata = std::move(stored.metadata);
  for (const StoredTensor& tensor : stored.tensors) {
    loaded.tensors[tensor.name] = tensor_of(tensor, file);
  }
  return loaded;
}

}  // namespace sinkhorn::models
