// Files as the readers see them: mapped, cut into lines, checked, hashed, replaced whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sinkhorn::tasks {

using Path = std::filesystem::path;

// Throws Error "file:line: what"; line 0 means the file as a whole.
[[noreturn]] void fail(const Path& file, int64_t line, const std::string& what);

// A file's bytes, paged in as they are read.
class MappedFile {
 public:
  explicit MappedFile(const Path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;
  size_t size_ = 0;
};

// Every line of a UTF-8 file with its number, without its end and without a byte order mark. An
// empty file and a byte that is not UTF-8 are errors.
using LineSink = std::function<void(std::string_view line, int64_t number)>;
void each_line(const Path& path, const LineSink& sink);
// The same of what can be read once, as it comes; name: what errors call it.
void each_line(std::istream& in, const Path& name, const LineSink& sink);

// Bytes of the byte order mark that a text begins with, or 0.
size_t byte_order_mark(std::string_view text);

// Whether there is nothing in it but space.
bool blank(std::string_view text);

// Bytes of the well-formed UTF-8 character at the front of `text` (Unicode, table 3-7), or 0.
size_t character_bytes(std::string_view text);

// The number of the first byte, from 1 on, that is not UTF-8.
std::optional<size_t> first_bad_byte(std::string_view text);

// Throws with the line and the offset of the first byte that is not UTF-8. The text begins at line
// `number` of the file.
void check_utf8(const Path& file, std::string_view text, int64_t number);

// The files of root that match a pattern such as "train/pos/*.txt" (one star, in the name), sorted.
std::vector<Path> match(const Path& root, const std::string& pattern);

// All files in a folder and its folders, sorted, but for hidden ones and what links lead to.
std::vector<Path> files_below(const Path& folder);

// A key for what a cached file was made from.
class Key {
 public:
  Key& add(std::string_view text);
  Key& add(int64_t number);
  Key& add_file(const Path& path);  // its path, size and time of change
  std::string hex() const;

 private:
  uint64_t state_[2] = {0x243f6a8885a308d3u, 0x13198a2e03707344u};
};

// Where cached files go: `configured`, or $XDG_CACHE_HOME/sinkhorn, or ~/.cache/sinkhorn. Made.
Path cache_folder(const std::string& configured);

// A name beside `path` that no other process uses, to be renamed to it.
Path beside(const Path& path);
Path index_of(const Path& temporary);  // of a second file, needed until the first is whole

// Says that a file named by beside() is still written, also to processes of other machines and
// containers, to whom the number in its name says nothing.
class WriteLock {
 public:
  explicit WriteLock(const Path& temporary);
  ~WriteLock();
  WriteLock(const WriteLock&) = delete;
  WriteLock& operator=(const WriteLock&) = delete;

 private:
  int fd_;
};

// Removes files named by beside(), and their indices, that a process which was killed has left in a
// folder; only those whose names begin with `prefix`.
void remove_leftovers(const Path& folder, std::string_view prefix);

// The beginning of a text, between quotes.
std::string quoted(std::string_view text);

// "a, b or c".
std::string join(const std::vector<std::string>& words);

}  // namespace sinkhorn::tasks
