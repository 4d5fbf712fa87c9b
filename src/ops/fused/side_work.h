// Side work: what backward computes and nobody reads before it is over, the gradients of weights,
// on a stream of its own, where it fills what the step's stream leaves idle.
//
// Autograd would hand such a gradient on, and add it to others, on the step's stream while it is
// still being written. So autograd never sees one: a node that works aside returns no gradient for
// the parameter, and the scope that was open in its forward adds it to the parameter's .grad once
// the two streams have met.
//
// Memory: what a piece of side work reads, and what it leaves behind, is made on the step's stream
// and kept until the streams meet, so that neither the allocator nor an addition in place gets at
// it before. What a piece makes and drops belongs to the side stream alone. No block changes
// streams while work on it is pending.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/custom_class.h>

#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace sinkhorn::ops {

// What one backward computes aside. Nodes hold it: backward runs on a thread of its own.
class SideWork : public torch::CustomClassHolder {
 public:
  explicit SideWork(c10::Stream stream);

  // Whether a gradient of `weight` may be left here: it is a parameter, or its taker is known.
  bool accepts(const at::Tensor& weight) const;
  // Runs `piece` aside, behind all that the current stream has been given. kept: what it reads,
  // and what it writes and leaves behind.
  void run(std::vector<at::Tensor> kept, const std::function<void()>& piece);
  // Leaves a gradient that pieces write.
  void leave(const at::Tensor& weight, const at::Tensor& gradient);

  // Says that the node which gave `table` will take the gradients that are left for it.
  void promise_to_take(const at::Tensor& table);
  // Their sum, for the current stream to use; undefined if there is none. memory: the table's.
  at::Tensor take(const void* memory);

  // The current stream behind all side work so far.
  void meet();
  // The same, and parameters get their gradients.
  void finish();

 private:
  // It holds no table: a table holds its node, and the node this.
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  c10::Stream stream_;
  c10::Event event_;
  bool apart_ = false;  // whether there is side work that nobody has met
  std::vector<at::Tensor> kept_;
  size_t kept_bytes_ = 0;
  std::vector<std::pair<at::Tensor, at::Tensor>> parameters_;  // and their gradients
  std::map<const void*, at::Tensor> tables_;                   // gradients by their memory
  std::vector<WeakTensor> promised_;
};

using SideWorkPtr = c10::intrusive_ptr<SideWork>;

// `piece` aside, or at once where there is no side.
void run_aside(SideWork* side, std::vector<at::Tensor> kept, const std::function<void()>& piece);

// A stream of that device for side work; none where it has one for all.
std::optional<c10::Stream> make_side_stream(c10::Device device);

// While one lives, linear layers, norms, embeddings and losses that run forward on this thread
// leave work to it. join() belongs behind backward and before whatever reads a gradient or the
// loss. With no stream nothing is done aside.
class SideScope {
 public:
  explicit SideScope(std::optional<c10::Stream> stream);
  ~SideScope();  // meets what an exception has left, so that a capture can end
  SideScope(const SideScope&) = delete;
  SideScope& operator=(const SideScope&) = delete;

  void join();
  static SideWorkPtr current();  // of this thread; null: none

 private:
  SideWorkPtr outer_;
};

}  // namespace sinkhorn::ops
