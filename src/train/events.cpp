// A file is a sequence of TFRecords: uint64 length, uint32 masked CRC32C of the length, the bytes,
// uint32 masked CRC32C of the bytes, all little-endian. The bytes are an Event in protobuf
// encoding:
//   Event      { 1: double wall_time; 2: int64 step; 3: string file_version; 5: Summary summary;
//                7: SessionLog session_log }
//   Summary    { repeated 1: Value { 1: string tag; 2: float simple_value } }
//   SessionLog { 1: enum status, START = 1 }
// A field is a varint key (number << 3 | wire type) and its value. Few enough to write by hand.
#include "train/events.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <string_view>

namespace sinkhorn::train {

namespace fs = std::filesystem;

namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

constexpr std::array<uint32_t, 256> crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[byte] = crc;
  }
  return table;
}

uint32_t masked_crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc32c_table();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

// The bytes of a number as they lie in memory: little-endian on every machine this builds for.
template <typename T>
void append_raw(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void append_key(std::string& out, int field, WireType type) {
  append_varint(out, static_cast<uint64_t>(field) << 3 | type);
}

void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_key(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

std::string event_at(int64_t step) {
  using std::chrono::duration;
  using std::chrono::system_clock;
  std::string event;
  append_key(event, 1, kFixed64);
  append_raw(event, duration<double>(system_clock::now().time_since_epoch()).count());
  append_key(event, 2, kVarint);
  append_varint(event, static_cast<uint64_t>(step));
  return event;
}

// The time in seconds, or the next second that no file of the folder carries.
fs::path next_path(const fs::path& folder) {
  int64_t seconds = std::chrono::duration_cast<std::chrono::seconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();
  for (const fs::path& path : models::list_folder(folder)) {
    const std::string name = path.filename().string();
    if (!name.starts_with(kEventsPrefix)) continue;
    int64_t taken = 0;
    std::from_chars(name.data() + kEventsPrefix.size(), name.data() + name.size(), taken);
    seconds = std::max(seconds, taken + 1);
  }
  char host[256] = "localhost";
  ::gethostname(host, sizeof host - 1);
  return folder / (std::string(kEventsPrefix) + std::to_string(seconds) + "." + host);
}

}  // namespace

EventFile::EventFile(const fs::path& folder, std::optional<int64_t> restart_step)
    : file_(next_path(folder), O_WRONLY | O_CREAT | O_EXCL | O_APPEND) {
  std::string version = event_at(0);
  append_bytes(version, 3, "brain.Event:2");
  add_record(version);
  if (restart_step) {
    std::string start;
    append_key(start, 1, kVarint);
    append_varint(start, 1);
    std::string session = event_at(*restart_step);
    append_bytes(session, 7, start);
    add_record(session);
  }
}

void EventFile::add_scalars(int64_t step,
                            const std::vector<std::pair<std::string, double>>& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;
    append_bytes(value, 1, tag);
    append_key(value, 2, kFixed32);
    append_raw(value, static_cast<float>(number));
    append_bytes(summary, 1, value);
  }
  std::string event = event_at(step);
  append_bytes(event, 5, summary);
  add_record(event);
}

void EventFile::add_record(const std::string& event) {
  std::string record;
  append_raw(record, static_cast<uint64_t>(event.size()));
  append_raw(record, masked_crc32c(record));
  record += event;
  append_raw(record, masked_crc32c(event));
  file_.write(record);  // in one call, so that a reader seldom meets half a record
}

}  // namespace sinkhorn::train
