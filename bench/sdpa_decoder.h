// A language model with full attention, decoded by Torch's scaled_dot_product_attention over a
// cache of keys and values: the peer that others would write. What all layers share is made once a
// step, the step is captured and replayed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "generate/step_graphs.h"
#include "ops/decode/decode.h"
#include "sinkhorn/models/models.h"

namespace sinkhorn::bench {

// Which of Torch's kernels serve; a mask is nothing that FlashAttention takes.
enum class Sdpa { kAny, kCudnn, kEfficient };

class SdpaDecoder {
 public:
  // Products and caches are bf16. A backend that refuses these shapes throws in step().
  SdpaDecoder(std::shared_ptr<models::LanguageModel> model, int64_t batch, int64_t capacity,
              Sdpa backend);

  // Every slot s holds lengths[s] tokens of random keys and values: what they are takes no time.
  void pretend(const std::vector<int64_t>& lengths);
  // One more token in every slot, ids [batch] int64 on the CPU. Returns the logits after it,
  // [batch, V], valid until the next call.
  at::Tensor step(const at::Tensor& ids);

  int64_t batch() const { return ids_.size(0); }
  int64_t capacity() const { return capacity_; }
  int64_t state_bytes() const;

 private:
  struct Cache {
    at::Tensor key, value;  // [B, H, C, D]
  };
  struct Shared;  // what all layers of a step read

  at::Tensor run_step(int64_t end);
  at::Tensor attend(size_t layer, const at::Tensor& x, const Shared& shared);
  void keep(const Cache& cache, const nn::SinkhornAttention::Heads& heads, const Shared& shared);

  std::shared_ptr<models::LanguageModel> model_;
  models::DecoderParts parts_;
  Sdpa backend_;
  int64_t capacity_, longest_ = 0;
  nn::Context context_;
  std::vector<Cache> caches_;
  at::Tensor ids_, places_;  // [B]
  std::unique_ptr<nn::CopyScope> copies_;
  std::unique_ptr<generate::StepGraphs> graphs_;  // null: steps run as they are
};

}  // namespace sinkhorn::bench
