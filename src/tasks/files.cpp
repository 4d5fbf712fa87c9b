#include "tasks/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <istream>
#include <optional>

#include "sinkhorn/error.h"
#include "tasks/random.h"

namespace sinkhorn::tasks {
namespace fs = std::filesystem;

void fail(const Path& file, int64_t line, const std::string& what) {
  throw Error(file.string() + (line > 0 ? ":" + std::to_string(line) : "") + ": " + what);
}

MappedFile::MappedFile(const Path& path) {
  // A pipe without a writer would be waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(path, 0, std::string("cannot be opened: ") + std::strerror(errno));
  struct stat info{};
  const bool readable = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  size_ = readable ? static_cast<size_t>(info.st_size) : 0;
  void* data = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0) : nullptr;
  const int error = errno;
  ::close(fd);
  if (!readable) fail(path, 0, "is not a file; expected one");
  if (data == MAP_FAILED) fail(path, 0, std::string("cannot be read: ") + std::strerror(error));
  data_ = static_cast<const char*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
}

size_t character_bytes(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  if (first < 0x80) return 1;
  const size_t count = first >= 0xc2 && first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (first < 0xc2 || count == 0 || text.size() < count) return 0;
  for (size_t i = 1; i < count; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned char low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  return at(1) >= low && at(1) <= high ? count : 0;
}

std::optional<size_t> first_bad_byte(std::string_view text) {
  for (size_t i = 0, count = 0; i < text.size(); i += count) {
    count = character_bytes(text.substr(i));
    if (count == 0) return i + 1;
  }
  return std::nullopt;
}

void check_utf8(const Path& file, std::string_view text, int64_t number) {
  size_t line_start = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t count = character_bytes(text.substr(i));
    if (count == 0) {
      char what[96];
      std::snprintf(what, sizeof what, "byte %zu of the line is 0x%02x; expected UTF-8 text",
                    i - line_start + 1, static_cast<unsigned char>(text[i]));
      fail(file, number, what);
    }
    if (text[i] == '\n') {
      ++number;
      line_start = i + 1;
    }
    i += count;
  }
}

namespace {

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

void pass_on(const Path& path, std::string_view line, int64_t number, const LineSink& sink) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  check_utf8(path, line, number);
  sink(line, number);
}

}  // namespace

size_t byte_order_mark(std::string_view text) {
  return text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
}

void each_line(const Path& path, const LineSink& sink) {
  const MappedFile file(path);
  std::string_view rest = file.bytes();
  if (rest.empty()) fail(path, 0, "the file is empty; expected lines of text");
  rest.remove_prefix(byte_order_mark(rest));
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    pass_on(path, line, number, sink);
  }
}

void each_line(std::istream& in, const Path& name, const LineSink& sink) {
  int64_t number = 0;
  for (std::string text; std::getline(in, text);) {
    std::string_view line = text;
    if (++number == 1) line.remove_prefix(byte_order_mark(line));
    pass_on(name, line, number, sink);
  }
  if (in.bad()) fail(name, number + 1, "cannot be read");
  if (number == 0) fail(name, 0, "is empty; expected lines of text");
}

bool blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == text.npos; }

namespace {

void add_files_below(const Path& folder, std::vector<Path>& files) {
  std::error_code error;
  const auto check = [&] {
    if (error) fail(folder, 0, "cannot be read: " + error.message());
  };
  fs::directory_iterator entry(folder, error);
  check();
  while (entry != fs::directory_iterator()) {
    if (!entry->path().filename().string().starts_with(".")) {
      const bool is_folder = fs::is_directory(entry->symlink_status(error));
      check();
      if (is_folder) {
        add_files_below(entry->path(), files);
      } else if (entry->is_regular_file(error)) {  // a link may lead nowhere
        files.push_back(entry->path());
      }
    }
    entry.increment(error);
    check();
  }
}

}  // namespace

std::vector<Path> files_below(const Path& folder) {
  std::vector<Path> files;
  add_files_below(folder, files);
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<Path> match(const Path& root, const std::string& pattern) {
  const Path whole = root / pattern;
  const std::string name = whole.filename().string();
  const size_t star = name.find('*');
  std::error_code error;
  if (star == std::string::npos) {
    return fs::is_regular_file(whole, error) ? std::vector{whole} : std::vector<Path>{};
  }
  const std::string head = name.substr(0, star), tail = name.substr(star + 1);
  std::vector<Path> found;
  for (const auto& entry : fs::directory_iterator(whole.parent_path(), error)) {
    const std::string file = entry.path().filename().string();
    if (file.size() >= head.size() + tail.size() && file.starts_with(head) &&
        file.ends_with(tail) && entry.is_regular_file(error)) {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Key& Key::add(int64_t number) {
  state_[0] = mix64(state_[0] ^ static_cast<uint64_t>(number));
  state_[1] = mix64(state_[1] + mix64(state_[0]));
  return *this;
}

Key& Key::add(std::string_view text) {
  add(static_cast<int64_t>(text.size()));
  for (size_t i = 0; i < text.size(); i += 8) {
    int64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
    add(word);
  }
  return *this;
}

Key& Key::add_file(const Path& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0) {
    fail(path, 0, std::string("cannot be read: ") + std::strerror(errno));
  }
  return add(fs::absolute(path).lexically_normal().string())
      .add(info.st_size)
      .add(info.st_mtim.tv_sec)
      .add(info.st_mtim.tv_nsec);
}

std::string Key::hex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016lx%016lx", static_cast<unsigned long>(state_[0]),
                static_cast<unsigned long>(state_[1]));
  return text;
}

Path cache_folder(const std::string& configured) {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  Path folder = configured;
  if (folder.empty() && !variable("XDG_CACHE_HOME").empty()) {
    folder = Path(variable("XDG_CACHE_HOME")) / "sinkhorn";
  } else if (folder.empty() && !variable("HOME").empty()) {
    folder = Path(variable("HOME")) / ".cache" / "sinkhorn";
  }
  if (folder.empty()) throw UsageError("task.cache: no HOME to keep a cache in; expected a folder");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail(folder, 0, "cannot be made: " + error.message() + "; set task.cache to a folder");
  return folder;
}

namespace {

constexpr std::string_view kTemporary = ".tmp-", kIndexEnding = ".index";

// The process that a name of beside() speaks of.
std::optional<pid_t> writer_of(std::string_view name) {
  const size_t at = name.rfind(kTemporary);
  if (at == name.npos) return std::nullopt;
  const char* end = name.data() + name.size();
  pid_t pid = 0;
  const auto [rest, error] = std::from_chars(name.data() + at + kTemporary.size(), end, pid);
  return error == std::errc() && rest == end && pid > 0 ? std::optional(pid) : std::nullopt;
}

bool is_leftover(const Path& temporary, pid_t writer) {
  if (::kill(writer, 0) == 0 || errno != ESRCH) return false;
  const int fd = ::open(temporary.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno == ENOENT;  // it was renamed, what stood beside it was not removed
  const bool free = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
  ::close(fd);
  return free;
}

}  // namespace

Path beside(const Path& path) {
  return path.string().append(kTemporary) + std::to_string(::getpid());
}

Path index_of(const Path& temporary) { return temporary.string().append(kIndexEnding); }

WriteLock::WriteLock(const Path& temporary)
    : fd_(::open(temporary.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) {
  // Where a file system has no locks remove_leftovers() gets none either, and removes nothing.
  if (fd_ >= 0) ::flock(fd_, LOCK_SH | LOCK_NB);
}

WriteLock::~WriteLock() {
  if (fd_ >= 0) ::close(fd_);
}

void remove_leftovers(const Path& folder, std::string_view prefix) {
  std::error_code error;  // ignored: what cannot be removed stays
  std::vector<Path> found;
  fs::directory_iterator entry(folder.empty() ? Path(".") : folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename().string();
    if (name.ends_with(kIndexEnding)) name.resize(name.size() - kIndexEnding.size());
    const auto writer = name.starts_with(prefix) ? writer_of(name) : std::nullopt;
    const Path temporary = folder / name;
    if (writer && is_leftover(temporary, *writer)) found.push_back(temporary);
  }
  for (const Path& temporary : found) {
    fs::remove(temporary, error);
    fs::remove(index_of(temporary), error);
  }
}

std::string quoted(std::string_view text) {
  std::string short_text(1, '\'');
  short_text.append(text.substr(0, 40)).append(text.size() > 40 ? "...'" : "'");
  return short_text;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  }
  return text;
}

}  // namespace sinkhorn::tasks
