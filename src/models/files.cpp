#include "models/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "sinkhorn/error.h"

namespace sinkhorn::models {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kSuffix = ".tmp";

[[noreturn]] void fail(const fs::path& path, const char* what) {
  throw Error(path.string() + ": cannot " + what + ": " + std::generic_category().message(errno));
}

}  // namespace

OutputFile::OutputFile(fs::path path, int flags)
    : path_(std::move(path)), descriptor_(::open(path_.c_str(), flags | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail(path_, "open for writing");
}

OutputFile::~OutputFile() { ::close(descriptor_); }

void OutputFile::write(const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const size_t part = std::min(size, size_t{1} << 30);  // the system takes at most 2 GiB a call
    const ssize_t written = ::write(descriptor_, at, part);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail(path_, "write");
    }
    at += written;
    size -= static_cast<size_t>(written);
  }
}

void OutputFile::sync() {
  // Pipes and the like cannot be synced, and need not be.
  if (::fsync(descriptor_) != 0 && errno != EINVAL && errno != EROFS) fail(path_, "sync");
}

void OutputFile::lock() {
  // Some network file systems have no locks: there, the user takes care.
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw Error(path_.string() + ": in use by another process; wait for it or stop it");
  }
}

AtomicFile::AtomicFile(fs::path path)
    : path_(std::move(path)), file_(temporary_for(path_), O_WRONLY | O_CREAT | O_TRUNC) {}

AtomicFile::~AtomicFile() {
  // After commit() the temporary name is gone, and this does nothing.
  ::unlink(file_.path().c_str());
}

void AtomicFile::commit() {
  file_.sync();
  replace(file_.path(), path_);
}

void write_atomically(const fs::path& path, std::string_view text) {
  std::error_code ignored;
  const fs::file_status there = fs::status(path, ignored);
  if (fs::exists(there) && !fs::is_regular_file(there)) {
    // A pipe or a device such as /dev/stdout is written to: a file in its place would be a loss.
    OutputFile(path, O_WRONLY).write(text);
    return;
  }
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

fs::path temporary_for(const fs::path& path) {
  return path.string() + "." + std::to_string(::getpid()) + std::string(kSuffix);
}

bool is_temporary(const fs::path& path) { return path.extension() == kSuffix; }

void replace(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(to, "put in place");
  const fs::path folder = to.has_parent_path() ? to.parent_path() : fs::path(".");
  OutputFile(folder, O_RDONLY | O_DIRECTORY).sync();
}

std::vector<fs::path> list_folder(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    paths.push_back(entry->path());
  }
  if (failed && failed != std::errc::no_such_file_or_directory) {
    throw Error(folder.string() + ": cannot list: " + failed.message());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string read_text(const fs::path& path) {
  if (fs::is_directory(path)) throw Error(path.string() + ": is not a file; expected one");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) fail(path, "read");
  return text;
}

}  // namespace sinkhorn::models
