// What a model says of its own accord: the likeliest token, again and again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sinkhorn/models/models.h"

namespace sinkhorn::train {

using Sequences = std::vector<std::vector<int32_t>>;

// A model that leaks the future has nothing to keep between tokens; it is run anew for each of
// them, on all it has said so far: what it says is well defined, if not worth much.

// The answer to each source [B, S], at most `limit` tokens, the end token with it where it came.
Sequences greedy_answers(const std::shared_ptr<models::Seq2Seq>& model, const at::Tensor& ids,
                         const std::optional<at::Tensor>& mask, int64_t limit,
                         const nn::Context& context);

// The next `count` tokens after each row of ids [B, L].
Sequences greedy_continuations(const std::shared_ptr<models::LanguageModel>& model,
                               const at::Tensor& ids, int64_t count, const nn::Context& context);

}  // namespace sinkhorn::train
