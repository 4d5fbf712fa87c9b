#include "generate/decoder_impl.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "generate/slots.h"
#include "sinkhorn/error.h"

namespace sinkhorn::generate {
namespace {

[[noreturn]] void refuse(const std::string& reason) { throw Error("decoder: " + reason); }

std::string shape_of(const at::Tensor& t) {
  std::string text = "[";
  for (const int64_t size : t.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void check_causal(const nn::SinkhornAttention& attention) {
  if (!nn::leaks_future(attention.config())) return;
  throw UsageError(
      "decoder: the model balances with columns 'full', whose sums read later blocks: what it says "
      "of a token changes with those after it, so that nothing can be kept between tokens; train "
      "with columns prefix, prior or none");
}

int64_t chosen_capacity(const models::ModelConfig& model, const nn::SinkhornAttention& attention,
                        int64_t asked) {
  if (asked < 0) refuse("capacity is " + std::to_string(asked) + "; it must be at least 1");
  const bool limited = attention.sorts() && !attention.sort_net()->bilinear();
  const int64_t most = limited ? attention.sort_net()->max_blocks() * attention.config().block : 0;
  if (asked == 0) return limited ? std::min(most, model.max_length) : model.max_length;
  if (!limited || asked <= most) return asked;
  throw UsageError("decoder: capacity " + std::to_string(asked) + " is more than the " +
                   std::to_string(most) + " tokens that the sort network '" +
                   attention.config().sort_net +
                   "' has columns for; ask for less, or train with a larger max_length or with "
                   "sort_net bilinear");
}

// The lengths of rows that are padded on the right, on the CPU.
std::vector<int64_t> row_lengths(const at::Tensor& ids, const std::optional<at::Tensor>& mask) {
  if (!mask.has_value()) {
    return std::vector<int64_t>(static_cast<size_t>(ids.size(0)), ids.size(1));
  }
  if (mask->sizes() != ids.sizes() || mask->scalar_type() != at::kBool) {
    refuse("mask " + shape_of(*mask) + " does not fit ids " + shape_of(ids) + "; it is bool");
  }
  const at::Tensor real = mask->cpu();
  const at::Tensor counts = real.sum(1).contiguous();
  if (!real.equal(at::arange(ids.size(1)) < counts.unsqueeze(1))) {
    refuse("a prompt has pads before its last token; pad on the right");
  }
  const int64_t* first = counts.data_ptr<int64_t>();
  return {first, first + counts.numel()};
}

}  // namespace

Decoder::Impl::Impl(std::shared_ptr<models::Model> model, models::DecoderParts parts,
                    models::Seq2Seq* reader, const DecoderOptions& options)
    : model_(std::move(model)), parts_(std::move(parts)), reader_(reader) {
  const auto& layers = parts_.stack->layers();
  for (const auto& layer : layers) check_causal(*layer->attention());
  if (options.batch < 1) {
    refuse("batch is " + std::to_string(options.batch) + "; it must be at least 1");
  }
  // Norms hand on their own type, whatever the embedding is kept in.
  const at::Tensor weight = parts_.stack->named_parameters()["norm.weight"];
  context_.compute = options.compute;
  const nn::SinkhornAttention& first = *layers.at(0)->attention();
  size_ = {
      options.batch, chosen_capacity(model_->config(), first, options.capacity),
      at::TensorOptions(options.compute.value_or(weight.scalar_type())).device(weight.device())};
  if (first.sorts()) block_ = first.config().block;
  self_.reserve(layers.size());
  cross_.reserve(layers.size());
  for (const auto& layer : layers) {
    self_.emplace_back(*layer->attention(), size_);
    if (layer->cross() != nullptr) cross_.emplace_back(*layer->cross(), size_);
  }
  lengths_.assign(static_cast<size_t>(size_.batch), 0);
  source_read_.assign(static_cast<size_t>(size_.batch), false);
  source_real_ = at::zeros({size_.batch, 0}, size_.options.dtype(at::kBool));
  places_ = at::zeros({size_.batch}, size_.options.dtype(at::kLong));
  auto stream = options.graph ? ops::make_capture_stream(device()) : nullptr;
  if (stream == nullptr) return;
  ids_ = at::zeros_like(places_);
  graphs_ = std::make_unique<StepGraphs>(std::move(stream));
}

at::Tensor Decoder::Impl::prefill(at::Tensor ids, const std::optional<at::Tensor>& mask,
                                  const std::vector<int64_t>& asked) {
  const at::NoGradGuard no_grad;
  check_evaluating();
  if (ids.dim() != 2) refuse("prompts are ids [rows, tokens], not " + shape_of(ids));
  const std::vector<int64_t> slots = checked_slots(asked, ids.size(0));
  const std::vector<int64_t> lengths = row_lengths(ids, mask);
  const auto [shortest, longest] = std::minmax_element(lengths.begin(), lengths.end());
  if (*shortest < 1) refuse("a prompt is empty; it needs one token at least");
  if (*longest > size_.capacity) {
    refuse("a prompt of " + std::to_string(*longest) + " tokens is longer than the capacity, " +
           std::to_string(size_.capacity) + "; shorten it, or ask for a larger capacity");
  }
  for (const int64_t slot : slots) check_read(static_cast<size_t>(slot));
  ids = ids.slice(1, 0, *longest).to(device());

  Prompt prompt{index(slots), index(lengths)};
  if (shortest != longest) {
    prompt.mask = at::arange(*longest, ids.options()) < prompt.lengths.unsqueeze(1);
    ids = at::where(*prompt.mask, ids, 0);
  }
  check_ids(ids);
  const at::Tensor visible = source_real_.index_select(0, prompt.slots);
  std::vector<nn::LayerAttention> attentions(self_.size());
  for (size_t i = 0; i < self_.size(); ++i) {
    attentions[i].self = [&, i](const at::Tensor& x) { return self_[i].prefill(x, prompt); };
    attentions[i].cross = [&, i](const at::Tensor& x) {
      return cross_[i].attend(x, prompt.slots, visible);
    };
  }
  const at::Tensor y = parts_.stack->forward(parts_.embedding->forward(ids), context_, attentions);
  places_.index_copy_(0, prompt.slots, prompt.lengths);
  for (size_t r = 0; r < slots.size(); ++r) lengths_[static_cast<size_t>(slots[r])] = lengths[r];
  const at::Tensor last = (prompt.lengths - 1).view({-1, 1, 1}).expand({-1, 1, y.size(2)});
  const at::Tensor logits = parts_.logits(at::gather(y, 1, last).squeeze(1));
  keep_copies();
  return logits;
}

void Decoder::Impl::read(const at::Tensor& sources, const std::optional<at::Tensor>& mask,
                         const std::vector<int64_t>& asked) {
  if (reader_ == nullptr) refuse("a language model reads no sources; only a Seq2Seq does");
  const at::NoGradGuard no_grad;
  check_evaluating();
  if (sources.dim() != 2 || sources.size(1) < 1) {
    refuse("sources are ids [rows, tokens], not " + shape_of(sources));
  }
  const std::vector<int64_t> slots = checked_slots(asked, sources.size(0));
  const at::Tensor ids = sources.to(device());
  check_ids(ids);
  const std::optional<at::Tensor> real =
      mask.has_value() ? std::optional<at::Tensor>(mask->to(device())) : std::nullopt;
  at::Tensor states = reader_->encode(ids, real, context_).states;
  at::Tensor seen = at::ones_like(ids, ids.options().dtype(at::kBool));
  if (real.has_value()) {
    states = at::where(real->unsqueeze(2), states, 0);
    // Who sees nothing gets 0: so does who sees a key and a value of 0 alone.
    seen = *real;
    seen = seen.logical_or(
        at::arange(seen.size(1), ids.options()).eq(0).logical_and(seen.any(1, true).logical_not()));
  }
  const int64_t length = ids.size(1), held = source_real_.size(1);
  if (length > held) {
    for (CrossState& state : cross_) state.resize(length);
    source_real_ = at::constant_pad_nd(source_real_, {0, length - held});
    if (graphs_ != nullptr) graphs_->forget();
  }
  const at::Tensor at_slots = index(slots);
  states = states.to(c10::typeMetaToScalarType(size_.options.dtype()));
  for (CrossState& state : cross_) state.read(states, at_slots);
  source_real_.index_copy_(0, at_slots,
                           at::constant_pad_nd(seen, {0, source_real_.size(1) - length}));
  for (const int64_t slot : slots) source_read_[static_cast<size_t>(slot)] = true;
}

at::Tensor Decoder::Impl::step(const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  check_evaluating();
  if (ids.dim() != 1 || ids.size(0) != size_.batch || ids.scalar_type() != at::kLong) {
    refuse("a step takes ids [" + std::to_string(size_.batch) + "] int64, not " + shape_of(ids));
  }
  const at::Tensor on_host = ids.cpu().contiguous();
  const int64_t* id = on_host.data_ptr<int64_t>();
  bool begins = false;
  int64_t end = 1;
  for (size_t s = 0; s < lengths_.size(); ++s) {
    if (id[s] >= 0) check_token(s, id[s]);
    begins = begins || (id[s] >= 0 && lengths_[s] % block_ == 0);
    end = std::max(end, std::min(lengths_[s] + 1, size_.capacity));
  }
  const at::Tensor logits = graphs_ != nullptr
                                ? replay_step(ids, begins, end)
                                : run_step(ids.to(device(), /*non_blocking=*/true), begins, end);
  for (size_t s = 0; s < lengths_.size(); ++s) lengths_[s] += id[s] >= 0 ? 1 : 0;
  keep_copies();
  return logits;
}

at::Tensor Decoder::Impl::run_step(const at::Tensor& ids, bool begins, int64_t end) {
  // An idle slot may be full: it has no place for a token, and takes none.
  const Step step{places_.clamp_max(size_.capacity - 1), ids >= 0, begins, end};
  std::vector<nn::LayerAttention> attentions(self_.size());
  for (size_t i = 0; i < self_.size(); ++i) {
    attentions[i].self = [&, i](const at::Tensor& x) { return self_[i].step(x, step); };
    attentions[i].cross = [&, i](const at::Tensor& x) {
      return cross_[i].attend(x, std::nullopt, source_real_);
    };
  }
  const at::Tensor x = parts_.embedding->forward_at(ids.clamp_min(0).unsqueeze(1),
                                                    step.places.unsqueeze(1), size_.capacity);
  const at::Tensor y = parts_.stack->forward(x, context_, attentions);
  places_.add_(step.active);
  return parts_.logits(y.squeeze(1));
}

at::Tensor Decoder::Impl::replay_step(const at::Tensor& ids, bool begins, int64_t end) {
  ids_.copy_(ids, /*non_blocking=*/true);
  const bool by_end = std::any_of(self_.begin(), self_.end(), [&](const SelfState& state) {
    return state.depends_on_end(begins);
  });
  const int64_t rounded = rounded_end(end, size_.capacity);
  return graphs_->run({begins, by_end ? rounded : 0},
                      [&] { return run_step(ids_, begins, rounded); });
}

void Decoder::Impl::reorder(const at::Tensor& sources) {
  const at::NoGradGuard no_grad;
  if (sources.dim() != 1 || sources.size(0) != size_.batch || sources.scalar_type() != at::kLong) {
    refuse("reorder takes sources [" + std::to_string(size_.batch) + "] int64, not " +
           shape_of(sources));
  }
  const at::Tensor on_host = sources.cpu().contiguous();
  const int64_t* from = on_host.data_ptr<int64_t>();
  const auto lengths = lengths_;
  const auto source_read = source_read_;
  for (size_t s = 0; s < lengths.size(); ++s) {
    if (from[s] < 0 || from[s] >= size_.batch) {
      refuse("reorder: slot " + std::to_string(from[s]) + " is not one of the " +
             std::to_string(size_.batch));
    }
  }
  const at::Tensor on_device = sources.to(device());
  for (const at::Tensor& t : tensors(longest())) t.copy_(t.index_select(0, on_device));
  for (size_t s = 0; s < lengths.size(); ++s) {
    lengths_[s] = lengths[static_cast<size_t>(from[s])];
    source_read_[s] = source_read[static_cast<size_t>(from[s])];
  }
}

void Decoder::Impl::copy(int64_t from, const std::vector<int64_t>& to) {
  if (to.empty()) return;
  const at::NoGradGuard no_grad;
  checked_slots({from}, 1);
  checked_slots(to, static_cast<int64_t>(to.size()));
  const at::Tensor slots = index(to), source = at::full_like(slots, from);
  for (const at::Tensor& t : tensors(longest())) set_slots(t, slots, t.index_select(0, source));
  for (const int64_t slot : to) {
    lengths_[static_cast<size_t>(slot)] = lengths_[static_cast<size_t>(from)];
    source_read_[static_cast<size_t>(slot)] = source_read_[static_cast<size_t>(from)];
  }
}

int64_t Decoder::Impl::state_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& t : tensors(size_.capacity)) bytes += static_cast<int64_t>(t.nbytes());
  return bytes;
}

std::vector<at::Tensor> Decoder::Impl::tensors(int64_t end) const {
  std::vector<at::Tensor> all{places_, source_real_};
  const auto add = [&](const std::vector<at::Tensor>& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  for (const SelfState& state : self_) add(state.tensors(end));
  for (const CrossState& state : cross_) add(state.tensors());
  return all;
}

int64_t Decoder::Impl::longest() const {
  return *std::max_element(lengths_.begin(), lengths_.end());
}

at::Tensor Decoder::Impl::index(const std::vector<int64_t>& numbers) const {
  return at::tensor(numbers, at::kLong).to(device());
}

std::vector<int64_t> Decoder::Impl::checked_slots(const std::vector<int64_t>& asked,
                                                  int64_t rows) const {
  std::vector<int64_t> slots = asked;
  if (slots.empty()) {
    slots.resize(static_cast<size_t>(rows));
    std::iota(slots.begin(), slots.end(), 0);
  }
  if (rows < 1 || static_cast<int64_t>(slots.size()) != rows) {
    refuse(std::to_string(rows) + " rows for " + std::to_string(slots.size()) + " slots");
  }
  std::vector<bool> taken(static_cast<size_t>(size_.batch), false);
  for (const int64_t slot : slots) {
    if (slot < 0 || slot >= size_.batch) {
      refuse("slot " + std::to_string(slot) + " is not one of the " + std::to_string(size_.batch) +
             "; ask for a larger batch");
    }
    if (taken[static_cast<size_t>(slot)]) {
      refuse("slot " + std::to_string(slot) + " is given to two rows");
    }
    taken[static_cast<size_t>(slot)] = true;
  }
  return slots;
}

void Decoder::Impl::check_evaluating() const {
  if (model_->is_training()) refuse("the model is training; call eval() on it first");
}

void Decoder::Impl::check_ids(const at::Tensor& ids) const {
  if (ids.scalar_type() != at::kLong) refuse("ids are int64");
  const int64_t vocab = parts_.embedding->weight.size(0);
  const auto [least, most] = ids.aminmax();
  if (least.item<int64_t>() < 0 || most.item<int64_t>() >= vocab) {
    refuse("ids go from " + std::to_string(least.item<int64_t>()) + " to " +
           std::to_string(most.item<int64_t>()) + "; the model knows 0 to " +
           std::to_string(vocab - 1));
  }
}

void Decoder::Impl::check_token(size_t slot, int64_t id) const {
  const int64_t vocab = parts_.embedding->weight.size(0);
  if (id >= vocab) {
    refuse("id " + std::to_string(id) + " in slot " + std::to_string(slot) +
           "; the model knows 0 to " + std::to_string(vocab - 1));
  }
  if (lengths_[slot] >= size_.capacity) {
    refuse("slot " + std::to_string(slot) + " is full: it holds its capacity of " +
           std::to_string(size_.capacity) + " tokens; ask for a larger capacity");
  }
  check_read(slot);
}

void Decoder::Impl::check_read(size_t slot) const {
  if (reader_ == nullptr || source_read_[slot]) return;
  refuse("slot " + std::to_string(slot) + " has no source yet; call read() first");
}

// Products that convert a weight on every call have asked for it by now: keep what they want.
void Decoder::Impl::keep_copies() {
  if (copies_ == nullptr) copies_ = std::make_unique<nn::CopyScope>(*model_);
}

}  // namespace sinkhorn::generate
