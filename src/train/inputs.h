// Batches as tensors, made ready in the background.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "sinkhorn/models/models.h"
#include "tasks/task.h"

namespace sinkhorn::train {

// On the CPU; pinned, so that a copy to the GPU need not wait.
models::Input make_input(const tasks::Batch& batch, bool pinned);
// A copy on the device; where pinned, it goes on while the CPU does other things.
models::Input to_device(const models::Input& input, at::Device device);
// Copies values into tensors that a graph reads; the shapes are equal.
void copy_into(models::Input& to, const models::Input& from);
// Shapes and presence of masks: inputs of one signature run the same kernels.
std::string signature(const models::Input& input);

struct Prepared {
  models::Input input;
  int64_t tokens = 0, rows = 0;
  std::string position;  // of the source, behind this batch
};

// Reads a training source ahead in a thread of its own.
class Prefetcher {
 public:
  Prefetcher(std::unique_ptr<tasks::BatchSource> source, bool pinned);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  Prepared next();  // throws what the source threw

 private:
  void work();

  static constexpr size_t kAhead = 4;
  std::unique_ptr<tasks::BatchSource> source_;
  bool pinned_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Prepared> ready_;
  std::exception_ptr failed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace sinkhorn::train
