// The other direction of events.cpp, which has the format. Only what is written there is read:
// unknown fields are stepped over.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "sinkhorn/error.h"
#include "train/events.h"

namespace sinkhorn::train {

namespace fs = std::filesystem;

namespace {

constexpr size_t kBeforeRecord = 12, kBehindRecord = 4;  // length and its checksum; a checksum

// One field after another of a protobuf message; throws Error where it breaks off.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  bool next() {
    if (rest_.empty()) return false;
    const uint64_t key = varint();
    number_ = key >> 3;
    bytes_ = {};
    varint_ = 0;
    switch (key & 7) {
      case 0: varint_ = varint(); break;
      case 1: bytes_ = take(8); break;
      case 2: bytes_ = take(varint()); break;
      case 5: bytes_ = take(4); break;
      default: throw Error("not an event");
    }
    return true;
  }
  uint64_t number() const { return number_; }
  uint64_t whole() const { return varint_; }
  std::string_view bytes() const { return bytes_; }

 private:
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) throw Error("not an event");
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw Error("not an event");
  }

  std::string_view rest_, bytes_;
  uint64_t number_ = 0, varint_ = 0;
};

template <typename T>
T raw(std::string_view bytes) {
  T value{};
  if (bytes.size() < sizeof value) throw Error("not an event");
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

Scalar scalar_of(std::string_view message, int64_t step) {
  Scalar scalar{step, "", 0};
  for (Fields value(message); value.next();) {
    if (value.number() == 1) scalar.tag = value.bytes();
    if (value.number() == 2) scalar.value = raw<float>(value.bytes());
  }
  return scalar;
}

void read_event(std::string_view event, std::vector<Scalar>& scalars) {
  int64_t step = 0;
  for (Fields field(event); field.next();) {
    if (field.number() == 2) step = static_cast<int64_t>(field.whole());
    if (field.number() == 5) {
      for (Fields summary(field.bytes()); summary.next();) {
        if (summary.number() == 1) scalars.push_back(scalar_of(summary.bytes(), step));
      }
    }
    if (field.number() == 7) {  // a restart
      std::erase_if(scalars, [&](const Scalar& scalar) { return scalar.step >= step; });
    }
  }
}

void read_file(std::string_view rest, std::vector<Scalar>& scalars) {
  while (!rest.empty()) {
    const uint64_t size = raw<uint64_t>(rest);
    if (rest.size() < kBeforeRecord + kBehindRecord ||
        size > rest.size() - kBeforeRecord - kBehindRecord) {
      throw Error("breaks off");
    }
    read_event(rest.substr(kBeforeRecord, size), scalars);
    rest.remove_prefix(kBeforeRecord + size + kBehindRecord);
  }
}

}  // namespace

std::vector<Scalar> read_scalars(const fs::path& folder, std::vector<std::string>& broken) {
  std::vector<Scalar> scalars;
  for (const fs::path& path : models::list_folder(folder)) {
    const std::string name = path.filename().string();
    if (!name.starts_with(kEventsPrefix)) continue;
    try {
      read_file(models::read_text(path), scalars);
    } catch (const Error&) {
      broken.push_back(name);
    }
  }
  return scalars;
}

}  // namespace sinkhorn::train
