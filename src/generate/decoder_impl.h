// Behind Decoder: the host's part of decoding. It checks, keeps its own copy of the slots' lengths,
// and chooses what a step has to do; the steps themselves wait for nothing.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "generate/layer_state.h"
#include "generate/step_graphs.h"
#include "sinkhorn/generate.h"

namespace sinkhorn::generate {

class Decoder::Impl {
 public:
  Impl(std::shared_ptr<models::Model> model, models::DecoderParts parts, models::Seq2Seq* reader,
       const DecoderOptions& options);

  at::Tensor prefill(at::Tensor ids, const std::optional<at::Tensor>& mask,
                     const std::vector<int64_t>& slots);
  void read(const at::Tensor& sources, const std::optional<at::Tensor>& mask,
            const std::vector<int64_t>& slots);
  at::Tensor step(const at::Tensor& ids);
  void reorder(const at::Tensor& sources);
  void copy(int64_t from, const std::vector<int64_t>& to);

  const std::vector<int64_t>& lengths() const { return lengths_; }
  int64_t batch() const { return size_.batch; }
  int64_t capacity() const { return size_.capacity; }
  int64_t state_bytes() const;
  at::Device device() const { return size_.options.device(); }

 private:
  // One token in every slot where ids [B] is not negative. Fixed shapes for the same begins and
  // end, places from the device, no waiting: what a graph can hold.
  at::Tensor run_step(const at::Tensor& ids, bool begins, int64_t end);
  // The same from a graph, where there is one by now.
  at::Tensor replay_step(const at::Tensor& ids, bool begins, int64_t end);

  std::vector<int64_t> checked_slots(const std::vector<int64_t>& slots, int64_t rows) const;
  void check_evaluating() const;
  void check_ids(const at::Tensor& ids) const;
  void check_token(size_t slot, int64_t id) const;
  void check_read(size_t slot) const;
  void keep_copies();
  at::Tensor index(const std::vector<int64_t>& numbers) const;
  std::vector<at::Tensor> tensors(int64_t end) const;
  int64_t longest() const;

  std::shared_ptr<models::Model> model_;
  models::DecoderParts parts_;
  models::Seq2Seq* reader_;  // null: a language model
  nn::Context context_;
  StateSize size_;
  int64_t block_ = 1;  // of the sorting layers
  std::vector<SelfState> self_;
  std::vector<CrossState> cross_;
  at::Tensor source_real_;         // [B, S] bool: what may be seen of the sources
  std::vector<bool> source_read_;  // [B]
  std::vector<int64_t> lengths_;   // [B]
  at::Tensor places_;              // the same on the device
  std::unique_ptr<nn::CopyScope> copies_;
  at::Tensor ids_;                      // [B]: what the graphs read
  std::unique_ptr<StepGraphs> graphs_;  // null: steps run as they are
};

}  // namespace sinkhorn::generate
