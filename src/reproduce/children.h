// Child processes that are this program again, a few at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace sinkhorn::reproduce {

struct Child {
  std::string name;                // as shown
  std::vector<std::string> words;  // of the command line, behind the program's name
  std::filesystem::path log;       // its output
  // Children of one `shares` read the same data: the first alone until it trains, so that the rest
  // find its vocabulary and token files in the cache. "": nothing is shared.
  std::string shares;
};

// What became of a child.
struct Ending {
  int code = 0;      // exit code; 128 + signal where one killed it
  std::string last;  // last line of its log
  double seconds = 0;
  bool stopped = false;  // by our signal, or never begun for it
};

class Watcher {
 public:
  virtual ~Watcher() = default;
  // Whether another may begin beside those that run; asked where there are some.
  virtual bool has_room(const std::vector<size_t>& running) {
    (void)running;
    return true;
  }
  virtual void began(size_t child) { (void)child; }
  // A few times a second, with the last line of every running child's log.
  virtual void watched(const std::vector<std::pair<size_t, std::string>>& running) {
    (void)running;
  }
  virtual void ended(size_t child, const Ending& ending) { (void)child, (void)ending; }
};

// Whether a child's log says that it trains.
bool is_training(const Child& child);

// Runs all, at most `at_once` together, in order; one that cannot be started fails alone. When
// `stop` becomes a signal's number, running children get that signal, and no other begins.
std::vector<Ending> run_children(const std::vector<Child>& children, int64_t at_once,
                                 Watcher& watcher, const std::atomic<int>& stop);

// The last line of a file that is not empty, at most its last 4,096 bytes; "" where there is none.
std::string last_line(const std::filesystem::path& path);

// This program's own file.
std::filesystem::path own_program();

}  // namespace sinkhorn::reproduce
