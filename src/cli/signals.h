// SIGINT and SIGTERM as a request to end: work that has something to keep looks at stop_signal.
#pragma once

#include <atomic>
#include <csignal>

namespace sinkhorn::cli {

inline std::atomic<int> stop_signal{0};  // its number; 0: none came

// A second signal of the same kind ends the program at once.
inline void on_signal(int signal) {
  stop_signal = signal;
  std::signal(signal, SIG_DFL);
}

inline void catch_signals() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

}  // namespace sinkhorn::cli
