// Signals as a request to end: work that has something to keep looks at stop_signal.
#pragma once

#include <atomic>
#include <csignal>

namespace sinkhorn::cli {

inline std::atomic<int> stop_signal{0};  // its number; 0: none came

// A second signal of the same kind ends the program at once; who does not read goes on not reading.
inline void on_signal(int signal) {
  stop_signal = signal;
  std::signal(signal, signal == SIGPIPE ? SIG_IGN : SIG_DFL);
}

inline void catch_signals() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}
// Those that come when the terminal, or who reads what is printed, goes away. What is ignored, as
// the first is under nohup, stays so.
inline void catch_departures() {
  for (const int signal : {SIGHUP, SIGPIPE}) {
    if (std::signal(signal, on_signal) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
}

}  // namespace sinkhorn::cli
