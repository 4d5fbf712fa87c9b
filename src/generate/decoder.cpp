#include "generate/decoder_impl.h"
#include "sinkhorn/generate.h"

namespace sinkhorn::generate {

Decoder::Decoder(std::shared_ptr<models::LanguageModel> model, const DecoderOptions& options)
    : impl_(std::make_unique<Impl>(model, model->decoder_parts(), nullptr, options)) {}

Decoder::Decoder(std::shared_ptr<models::Seq2Seq> model, const DecoderOptions& options)
    : impl_(std::make_unique<Impl>(model, model->decoder_parts(), model.get(), options)) {}

Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

at::Tensor Decoder::prefill(const at::Tensor& ids, const std::optional<at::Tensor>& mask,
                            const std::vector<int64_t>& slots) {
  return impl_->prefill(ids, mask, slots);
}

void Decoder::read(const at::Tensor& sources, const std::optional<at::Tensor>& mask,
                   const std::vector<int64_t>& slots) {
  impl_->read(sources, mask, slots);
}

at::Tensor Decoder::step(const at::Tensor& ids) { return impl_->step(ids); }

void Decoder::reorder(const at::Tensor& sources) { impl_->reorder(sources); }

void Decoder::copy(int64_t from, const std::vector<int64_t>& to) { impl_->copy(from, to); }

const std::vector<int64_t>& Decoder::lengths() const { return impl_->lengths(); }
int64_t Decoder::batch() const { return impl_->batch(); }
int64_t Decoder::capacity() const { return impl_->capacity(); }
int64_t Decoder::state_bytes() const { return impl_->state_bytes(); }
at::Device Decoder::device() const { return impl_->device(); }

}  // namespace sinkhorn::generate
