// What one layer keeps of the tokens it has read, a slot of the batch each (docs/math.md,
// decoding): keys and values; for sorting layers the running pool, the projected sources, the
// running column sums and the current sorted block. Every tensor has the batch first and stays
// where it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "generate/attend.h"
#include "sinkhorn/nn/attention.h"

namespace sinkhorn::generate {

// Sequences that begin in some of the slots.
struct Prompt {
  at::Tensor slots;                  // [R] int64
  at::Tensor lengths;                // [R] int64
  std::optional<at::Tensor> mask{};  // [R, L] bool: the first lengths[r]; absent: all
};

// One more token in every slot.
struct Step {
  at::Tensor places;    // [B] int64: where the token stands
  at::Tensor active;    // [B] bool: false leaves the slot as it is
  bool begins = false;  // some active token is the first of a block
  int64_t end = 0;      // all places are below: how much of the past is read
};

struct StateSize {
  int64_t batch = 0;
  int64_t capacity = 0;  // tokens
  at::TensorOptions options;
};

// How a sorting layer makes the rows of R: one when a block begins.
class SortState {
 public:
  SortState(nn::SinkhornAttention& attention, const StateSize& size);

  // x [R, L, E], 0 where masked. Returns R [R, H, N, N].
  at::Tensor prefill(const at::Tensor& x, const nn::SinkhornAttention::Heads& heads,
                     const Prompt& prompt);
  // x [B, E]; the token's key and value are in the cache.
  void step(const at::Tensor& x, const KeyValues& cache, const Step& step);

  // The same by kernels: what a token x [B, E] is pooled into, and, once it has been, the sorted
  // blocks of the slots that begin one.
  ops::DecodePools pools(const at::Tensor& x, bool begins) const;
  void begin_blocks(const ops::DecodeLayer& layer, const ops::DecodePools& pools);

  const SortedBlock& sorted() const { return sorted_; }
  std::vector<at::Tensor> tensors(int64_t end) const;

 private:
  struct Begun;  // which slots begin a block, and which one

  void begin_pools(const at::Tensor& x, const Prompt& prompt, const at::Tensor& last);
  // destinations [B, 1, E]: what describes the blocks that begin.
  void begin_block(const at::Tensor& destinations, const Begun& begun, const KeyValues& cache);
  void keep_sources(const at::Tensor& destinations, at::ScalarType type, const Begun& begun);
  at::Tensor next_row(const at::Tensor& destinations, const Begun& begun);
  at::Tensor allowed(const at::Tensor& rows, int64_t columns) const;
  SortedBlock sort(const at::Tensor& row, const at::Tensor& block, const KeyValues& cache) const;

  nn::SinkhornAttention& attention_;
  const nn::AttentionConfig& config_;
  nn::SortNet& net_;
  bool inclusive_, recent_;
  bool own_sources_;    // bilinear: a source is described by its own tokens
  at::Tensor pooled_;   // [B, E] float64: sum of the tokens to pool; long sums lose nothing so
  at::Tensor own_;      // [B, E] float64: sum of the current block's tokens, with own_sources_
  at::Tensor sources_;  // [B, H, N, D]: bilinear, of every block begun
  at::Tensor sums_;     // [B, H, K, N]: see balance_row.h
  SortedBlock sorted_;
};

// Self-attention of any kind.
class SelfState {
 public:
  SelfState(nn::SinkhornAttention& attention, const StateSize& size);

  at::Tensor prefill(const at::Tensor& x, const Prompt& prompt);  // [R, L, E] -> [R, L, E]
  at::Tensor step(const at::Tensor& x, const Step& step);         // [B, 1, E] -> [B, 1, E]

  // What the first `end` tokens of the slots have left.
  std::vector<at::Tensor> tensors(int64_t end) const;

  // Whether the shapes of a step depend on its `end`.
  bool depends_on_end(bool begins) const;

 private:
  // Takes in a token, x [B, 1, E], by the kernels of decoding.
  void keep(const at::Tensor& x, const nn::SinkhornAttention::Heads& heads, const Step& step);
  // query [B, H, 1, D] -> [B, H, 1, D]
  at::Tensor attend(const at::Tensor& query, const Step& step) const;
  at::Tensor attend_past(const at::Tensor& query, const Step& step) const;
  at::Tensor attend_sparse(const at::Tensor& query, const Step& step) const;
  at::Tensor attend_summaries(const at::Tensor& query, const Step& step) const;

  nn::SinkhornAttention& attention_;
  AttendRules rules_;
  KeyValues cache_;
  std::optional<SortState> sort_;
  bool by_kernels_ = false;
};

// Attention to an encoder's output, whose keys and values are made once.
class CrossState {
 public:
  CrossState(nn::CrossAttention& attention, const StateSize& size);

  // memory [R, S, E], 0 where masked, S at most the length that resize gave.
  void read(const at::Tensor& memory, const at::Tensor& slots);
  void resize(int64_t length);
  // x [R, L, E] of the slots (all: absent), visible [R, S] bool.
  at::Tensor attend(const at::Tensor& x, const std::optional<at::Tensor>& slots,
                    const at::Tensor& visible);

  std::vector<at::Tensor> tensors() const { return {cache_.key, cache_.value}; }

 private:
  nn::CrossAttention& attention_;
  KeyValues cache_;  // [B, H, S, D]
};

}  // namespace sinkhorn::generate
