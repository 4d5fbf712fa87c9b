// Writes down what a program does to files, for test_train_durability.py: loaded before the program
// (LD_PRELOAD), it stands before libc's functions of the same names, hands each call on, and adds a
// line to the file that DISK_LOG names: what, the paths and, of a write, the bytes, separated by
// tabs. Only what lies below DISK_FOLDER counts. Where DISK_ROOM is set, the disk is full after
// that many bytes below it.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool counts(const std::string& path) {
  static const std::string folder = variable("DISK_FOLDER");
  return !folder.empty() && path.compare(0, folder.size(), folder) == 0;
}

// By the system's own call: what is written here is not to be written down.
void note(const std::string& what, const std::string& path, const std::string& more = "") {
  static const int log =
      ::open(variable("DISK_LOG").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (!counts(path)) return;
  const std::string line = what + '\t' + path + (more.empty() ? "" : '\t' + more) + '\n';
  ::syscall(SYS_write, log, line.data(), line.size());
}

std::string path_of(int descriptor) {
  char path[PATH_MAX];
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t size = ::readlink(link.c_str(), path, sizeof path);
  return size < 0 ? "" : std::string(path, static_cast<size_t>(size));
}

template <class... Arguments>
auto hand_on(const char* name, Arguments... arguments) {
  using Result = std::conditional_t<sizeof...(Arguments) == 3, ssize_t, int>;
  return reinterpret_cast<Result (*)(Arguments...)>(dlsym(RTLD_NEXT, name))(arguments...);
}

std::atomic<long> room{variable("DISK_ROOM").empty() ? LONG_MAX : std::stol(variable("DISK_ROOM"))};

}  // namespace

extern "C" {

// A disk that fills up takes a part of what it is given, and then nothing.
ssize_t write(int descriptor, const void* data, size_t size) {
  const std::string path = path_of(descriptor);
  if (!counts(path)) return hand_on("write", descriptor, data, size);
  const size_t part = std::min(size, static_cast<size_t>(room.load()));
  if (part == 0 && size > 0) {
    errno = ENOSPC;
    return -1;
  }
  const ssize_t written = hand_on("write", descriptor, data, part);
  if (written > 0) room -= written;
  note("write", path, std::to_string(written));
  return written;
}

int fsync(int descriptor) {
  const int failed = hand_on("fsync", descriptor);
  if (failed == 0) note("sync", path_of(descriptor));
  return failed;
}

int rename(const char* from, const char* to) noexcept {
  const int failed = hand_on("rename", from, to);
  if (failed == 0) note("rename", from, to);
  return failed;
}

int link(const char* from, const char* to) noexcept {
  const int failed = hand_on("link", from, to);
  if (failed == 0) note("link", from, to);
  return failed;
}

int remove(const char* path) noexcept {
  const int failed = hand_on("remove", path);
  if (failed == 0) note("remove", path);
  return failed;
}

int mkdir(const char* path, mode_t mode) noexcept {
  const int failed = hand_on("mkdir", path, mode);
  if (failed == 0) note("mkdir", path);
  return failed;
}
}
