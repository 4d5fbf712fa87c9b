#include "reproduce/children.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <set>
#include <thread>

#include "sinkhorn/error.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPoll{100};
constexpr const char* kBegan = "$ sinkhorn";  // and the words, the first line of an attempt

struct Running {
  size_t child;
  pid_t process;
  Clock::time_point begin;
};

// In the child, between fork and exec: only calls that are safe there.
[[noreturn]] void become(const char* program, char* const* words, int log, pid_t parent) {
  setpgid(0, 0);                     // a terminal's Ctrl-C reaches it through the parent alone
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // it saves itself when the parent is killed
  if (getppid() != parent) _exit(127);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  execv(program, words);
  _exit(127);
}

pid_t start(const Child& child) {
  std::error_code failed;
  fs::create_directories(child.log.parent_path(), failed);
  const int log = open(child.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0) {
    throw Error(child.log.string() + ": cannot be written: " + std::strerror(errno));
  }
  // The child inherits the lock with its output, and holds it until it ends.
  if (flock(log, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(log);
    throw Error("in use by another process; wait for it or stop it");
  }
  const std::string program = own_program().string();
  std::vector<std::string> all = {program};
  all.insert(all.end(), child.words.begin(), child.words.end());
  // So that the end of an earlier attempt is not taken for what this one says.
  std::string line = kBegan;
  for (const std::string& word : child.words) line += " " + word;
  dprintf(log, "%s\n", line.c_str());
  std::vector<char*> words;
  for (std::string& word : all) words.push_back(word.data());
  words.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t process = fork();
  if (process == 0) become(program.c_str(), words.data(), log, parent);
  close(log);
  if (process < 0) throw Error(std::string("cannot start a process: ") + std::strerror(errno));
  return process;
}

class Pool {
 public:
  Pool(const std::vector<Child>& children, int64_t at_once, Watcher& watcher,
       const std::atomic<int>& stop)
      : children_(children), at_once_(at_once), watcher_(watcher), stop_(stop) {
    endings_.resize(children.size());
    for (size_t i = 0; i < children.size(); ++i) waiting_.push_back(i);
  }

  ~Pool() {  // only an exception leaves any
    for (const Running& r : running_) kill(r.process, SIGTERM);
    for (const Running& r : running_) waitpid(r.process, nullptr, 0);
  }

  std::vector<Ending> run() {
    while (!waiting_.empty() || !running_.empty()) {
      pass_on_signal();
      if (stop_ != 0) drop_waiting();
      while (begin_one()) {
      }
      reap();
      watch();
      if (!running_.empty()) std::this_thread::sleep_for(kPoll);
    }
    return endings_;
  }

 private:
  void pass_on_signal() {
    const int signal = stop_;
    if (signal == 0 || signal == passed_on_) return;
    passed_on_ = signal;
    for (const Running& r : running_) kill(r.process, signal);
  }

  void drop_waiting() {
    for (const size_t child : waiting_) endings_[child].stopped = true;
    waiting_.clear();
  }

  // Whether another child that has not come to train yet prepares the same data.
  bool must_wait(const Child& child) {
    if (child.shares.empty() || ready_.contains(child.shares)) return false;
    for (const Running& r : running_) {
      if (children_[r.child].shares != child.shares) continue;
      if (!is_training(children_[r.child])) return true;
      ready_.insert(child.shares);
      return false;
    }
    return false;
  }

  bool has_room() {
    if (static_cast<int64_t>(running_.size()) >= at_once_) return false;
    std::vector<size_t> running;
    for (const Running& r : running_) running.push_back(r.child);
    return running.empty() || watcher_.has_room(running);
  }

  bool begin_one() {
    if (waiting_.empty() || !has_room()) return false;
    for (auto next = waiting_.begin(); next != waiting_.end(); ++next) {
      if (must_wait(children_[*next])) continue;
      const size_t child = *next;
      waiting_.erase(next);
      begin(child);
      return true;
    }
    return false;
  }

  void begin(size_t child) {
    try {
      running_.push_back({child, start(children_[child]), Clock::now()});
      watcher_.began(child);
    } catch (const Error& error) {
      endings_[child] = {.code = 127, .last = error.what()};
      watcher_.ended(child, endings_[child]);
    }
  }

  void reap() {
    for (size_t i = 0; i < running_.size();) {
      const Running r = running_[i];
      int status = 0;
      const pid_t ended = waitpid(r.process, &status, WNOHANG);
      if (ended == 0 || (ended < 0 && errno == EINTR)) {
        ++i;
        continue;
      }
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      Ending& ending = endings_[r.child];
      ending.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      ending.last = last_line(children_[r.child].log);
      if (ending.last.starts_with(kBegan)) ending.last.clear();  // it said nothing
      ending.seconds = std::chrono::duration<double>(Clock::now() - r.begin).count();
      ending.stopped = stop_ != 0 && ending.code == 128 + stop_;
      watcher_.ended(r.child, ending);
    }
  }

  void watch() {
    std::vector<std::pair<size_t, std::string>> lines;
    for (const Running& r : running_) {
      lines.emplace_back(r.child, last_line(children_[r.child].log));
    }
    watcher_.watched(lines);
  }

  const std::vector<Child>& children_;
  const int64_t at_once_;
  Watcher& watcher_;
  const std::atomic<int>& stop_;
  std::vector<Ending> endings_;
  std::deque<size_t> waiting_;
  std::vector<Running> running_;
  std::set<std::string> ready_;
  int passed_on_ = 0;
};

}  // namespace

std::vector<Ending> run_children(const std::vector<Child>& children, int64_t at_once,
                                 Watcher& watcher, const std::atomic<int>& stop) {
  std::signal(SIGCHLD, SIG_DFL);  // ignored, it would hide how children end
  return Pool(children, at_once, watcher, stop).run();
}

bool is_training(const Child& child) { return last_line(child.log).starts_with("step "); }

std::string last_line(const fs::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return "";
  const std::streamoff size = file.tellg(), from = std::max<std::streamoff>(0, size - 4096);
  std::string text(static_cast<size_t>(size - from), '\0');
  file.seekg(from);
  file.read(text.data(), size - from);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

fs::path own_program() {
  std::error_code failed;
  const fs::path path = fs::read_symlink("/proc/self/exe", failed);
  if (failed) throw Error("/proc/self/exe: cannot be read: " + failed.message());
  return path;
}

}  // namespace sinkhorn::reproduce
