// Decoding that costs a block, not the whole past: a decoder's state is kept between tokens, so
// that a token looks at (2 + window) * b positions. Cached results equal the full pass to rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sinkhorn/models/models.h"
#include "sinkhorn/sampling.h"

namespace sinkhorn::generate {

struct DecoderOptions {
  int64_t batch = 1;     // sequences decoded together, each in a slot of its own
  int64_t capacity = 0;  // tokens a slot can hold; 0: the model's max_length or its sort columns'
  std::optional<at::ScalarType> compute{};  // type of products and caches; the parameters' own
  bool graph = true;                        // CUDA: steps are captured and replayed
};

// A batch of sequences that are being continued by a language model, or by the decoder of an
// encoder-decoder. Slots are independent: each has its own length.
class Decoder {
 public:
  // Throws UsageError for a model that leaks the future (full columns in a decoder): what it says
  // of a token depends on later ones, so that there is nothing to keep.
  Decoder(std::shared_ptr<models::LanguageModel> model, const DecoderOptions& options);
  Decoder(std::shared_ptr<models::Seq2Seq> model, const DecoderOptions& options);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  // Begins the sequences in `slots` (default: 0 .. R - 1) anew with ids [R, L], padded on the
  // right as mask [R, L] says (absent: all real; every row has a real token). One pass over the
  // prompt. Returns the logits after each row's last real token, [R, V].
  at::Tensor prefill(const at::Tensor& ids, const std::optional<at::Tensor>& mask = std::nullopt,
                     const std::vector<int64_t>& slots = {});
  // Seq2Seq: reads sources [R, S] into the slots; prefill begins the decoder's side (with token 1).
  void read(const at::Tensor& sources, const std::optional<at::Tensor>& mask = std::nullopt,
            const std::vector<int64_t>& slots = {});

  // One more token in every slot, ids [batch] int64; a negative id leaves its slot as it is (and
  // its logits meaningless). Returns the logits after it, [batch, V], valid until the next call.
  // ids on the CPU are sent along without waiting; those on another device are fetched, which waits
  // for it.
  at::Tensor step(const at::Tensor& ids);

  // Slot s goes on from what slot sources[s] was: beams that fork and die. [batch] int64.
  void reorder(const at::Tensor& sources);
  // The slots `to` go on from what slot `from` is, sources included; the others stay.
  void copy(int64_t from, const std::vector<int64_t>& to);

  const std::vector<int64_t>& lengths() const;  // tokens in each slot
  int64_t batch() const;
  int64_t capacity() const;
  int64_t state_bytes() const;  // of all slots, at full capacity
  at::Device device() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Continues every prompt (at most decoder.batch() of them), token by token: row r in slot r. What
// is drawn in a row depends on the seed, the row and the model's logits alone. Prompts of a Seq2Seq
// are what its decoder begins with; its sources are read before.
std::vector<Generated> sample(Decoder& decoder, const std::vector<std::vector<int64_t>>& prompts,
                              const SamplingOptions& sampling, const StopOptions& stop,
                              const OnToken& on_token = {});

// `count` continuations of one prompt, in slots 0 .. count - 1: the same as of `count` equal
// prompts, which is read once. A Seq2Seq's source is read into slot 0 before.
std::vector<Generated> sample_prompt(Decoder& decoder, const std::vector<int64_t>& prompt,
                                     int64_t count, const SamplingOptions& sampling,
                                     const StopOptions& stop, const OnToken& on_token = {});

// Beam search from one prompt in a decoder of `beams` slots: the best hypotheses, best first, at
// most `beams` of them. A Seq2Seq's source is read into slot 0 before. What `ends` says is over
// ends there (Ended::kCaller).
std::vector<Generated> beam_search(Decoder& decoder, const std::vector<int64_t>& prompt,
                                   const BeamOptions& beam, const StopOptions& stop,
                                   const OnExtension& ends = {});

}  // namespace sinkhorn::generate
