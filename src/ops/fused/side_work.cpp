#include "ops/fused/side_work.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace sinkhorn::ops {
namespace {

// Beyond this the step's stream waits, so that what is kept can go.
constexpr size_t kMostKept = size_t{256} << 20;

thread_local SideWorkPtr current_work;

c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

SideWork::SideWork(c10::Stream stream) : stream_(stream), event_(stream.device_type()) {}

bool SideWork::accepts(const at::Tensor& weight) const {
  if (weight.device() != stream_.device() || !weight.requires_grad()) return false;
  const auto is_it = [&](const WeakTensor& table) {
    return table.lock() == weight.getIntrusivePtr();
  };
  return weight.is_leaf() || std::any_of(promised_.begin(), promised_.end(), is_it);
}

void SideWork::run(std::vector<at::Tensor> kept, const std::function<void()>& piece) {
  if (kept_bytes_ > kMostKept) meet();
  for (at::Tensor& tensor : kept) {
    kept_bytes_ += tensor.nbytes();
    kept_.push_back(std::move(tensor));
  }
  if (!stream_.device().is_cpu()) {  // which runs everything in order
    event_.record(current_stream_of(stream_.device()));
    event_.block(stream_);
    apart_ = true;
  }
  const c10::StreamGuard guard(stream_);
  piece();
}

void SideWork::leave(const at::Tensor& weight, const at::Tensor& gradient) {
  if (weight.is_leaf()) {
    parameters_.emplace_back(weight, gradient);
    return;
  }
  const auto [place, fresh] = tables_.emplace(weight.const_data_ptr(), gradient);
  if (fresh) return;
  meet();
  place->second.add_(gradient);
}

void SideWork::promise_to_take(const at::Tensor& table) {
  promised_.emplace_back(table.getIntrusivePtr());
}

at::Tensor SideWork::take(const void* memory) {
  const auto found = tables_.extract(memory);
  if (found.empty()) return {};
  meet();
  return found.mapped();
}

void SideWork::meet() {
  if (apart_) {
    event_.record(stream_);
    event_.block(current_stream_of(stream_.device()));
  }
  apart_ = false;
  kept_.clear();
  kept_bytes_ = 0;
}

void SideWork::finish() {
  meet();
  TORCH_INTERNAL_ASSERT(tables_.empty(), "a gradient was left for a table and not taken");
  const at::NoGradGuard no_grad;
  for (const auto& [parameter, gradient] : parameters_) {
    at::Tensor& sum = parameter.mutable_grad();
    sum.defined() ? sum.add_(gradient) : sum = gradient;
  }
  parameters_.clear();
}

void run_aside(SideWork* side, std::vector<at::Tensor> kept, const std::function<void()>& piece) {
  side == nullptr ? piece() : side->run(std::move(kept), piece);
}

std::optional<c10::Stream> make_side_stream(c10::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

SideScope::SideScope(std::optional<c10::Stream> stream) : outer_(std::move(current_work)) {
  current_work = stream.has_value() ? c10::make_intrusive<SideWork>(*stream) : SideWorkPtr();
}

SideScope::~SideScope() {
  try {
    if (current_work) current_work->meet();
  } catch (const std::exception&) {  // what ended the scope is the cause
  }
  current_work = std::move(outer_);
}

void SideScope::join() {
  if (current_work) current_work->finish();
}

SideWorkPtr SideScope::current() { return current_work; }

}  // namespace sinkhorn::ops
