// Independent tasks over threads. Which worker takes which task is left to chance; what a task
// computes is not, so results do not depend on the number of threads.
#pragma once

#include "kernels/common/executor.h"
#include "kernels/cpu/simd.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

// Hands out pieces of one worker's scratch, each aligned to a vector.
template <class T>
class Scratch {
 public:
  explicit Scratch(T* memory) : next_(memory) {}
  T* take(int64_t count) {
    T* piece = next_;
    next_ += padded(count);
    return piece;
  }
  static constexpr int64_t padded(int64_t count) {
    return round_up(count, 64 / static_cast<int64_t>(sizeof(T)));
  }

 private:
  T* next_;
};

// Scratch of one's own.
template <class T>
class OwnScratch {
 public:
  explicit OwnScratch(int64_t count)
      : data_(static_cast<T*>(allocate_scratch(sizeof(T) * static_cast<size_t>(count)))) {}
  ~OwnScratch() { free_scratch(data_); }
  OwnScratch(const OwnScratch&) = delete;
  OwnScratch& operator=(const OwnScratch&) = delete;
  T* data() const { return data_; }

 private:
  T* data_;
};

// Calls task(index, scratch) for every index; scratch_count elements of T belong to each worker.
template <class T, class Task>
void for_each_task(const Executor& executor, int64_t tasks, int64_t scratch_count,
                   const Task& task) {
  if (tasks <= 0) return;
  struct Shared {
    const Task* task;
    T* scratch;
    int64_t stride, tasks, next;
  };
  const int workers = static_cast<int>(min_of<int64_t>(executor.workers, tasks));
  const int64_t stride = Scratch<T>::padded(scratch_count + 64);
  Shared shared{&task, nullptr, stride, tasks, 0};
  shared.scratch =
      static_cast<T*>(allocate_scratch(sizeof(T) * static_cast<size_t>(stride * workers)));
  executor.run(
      workers,
      [](void* context, int worker) {
        Shared& s = *static_cast<Shared*>(context);
        T* scratch = s.scratch + worker * s.stride;
        for (;;) {
          const int64_t index = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED);
          if (index >= s.tasks) return;
          (*s.task)(index, scratch);
        }
      },
      &shared);
  free_scratch(shared.scratch);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
