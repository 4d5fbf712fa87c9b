#include "serve/job.h"

namespace sinkhorn::serve {

std::vector<Event> Job::wait(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [&] { return !events_.empty() || refusal_ != nullptr; });
  if (refusal_ != nullptr) throw *refusal_;
  std::vector<Event> taken;
  taken.swap(events_);
  for (const Event& event : taken) unfinished_ -= event.finish.empty() ? 0 : 1;
  return taken;
}

bool Job::finished() const {
  const std::lock_guard lock(mutex_);
  return unfinished_ == 0;
}

void Job::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

void Job::push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  changed_.notify_all();
}

void Job::fail(const Refusal& refusal) {
  {
    const std::lock_guard lock(mutex_);
    refusal_ = std::make_unique<Refusal>(refusal);
  }
  changed_.notify_all();
}

bool Job::wanted() const {
  const std::lock_guard lock(mutex_);
  return !cancelled_ && refusal_ == nullptr;
}

}  // namespace sinkhorn::serve
