// Writing into tensors of slots, [B, ...], where they are.
#pragma once

#include <ATen/core/Tensor.h>

namespace sinkhorn::generate {

// The slots [R] become `from` [R, ...].
void set_slots(const at::Tensor& to, const at::Tensor& slots, const at::Tensor& from);

// The same along dim as far as `from` goes; behind it everything becomes `rest`.
void fill_slots(const at::Tensor& to, int64_t dim, const at::Tensor& slots, const at::Tensor& from,
                double rest);

// The slots chosen by [B] bool become those of `from` [B, ...].
void update_slots(const at::Tensor& to, const at::Tensor& chosen, const at::Tensor& from);

// to [B, H, C, D] at each slot's place [B] int64 becomes value [B, H, 1, D], in the chosen slots.
void write_at(const at::Tensor& to, const at::Tensor& places, const at::Tensor& value,
              const at::Tensor& chosen);

}  // namespace sinkhorn::generate
