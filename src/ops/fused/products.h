// Products of activations and weights, and what their backward has in common.
#pragma once

#include "ops/common.h"
#include "ops/fused/side_work.h"

namespace sinkhorn::ops {

// A weight [out, in] with rows of zeros behind it, for the time of a product: where rows of `out`
// numbers do not begin at multiples of 16 bytes, as with a vocabulary of 259 bytes, the library's
// products of half types load and store number by number.
Tensor with_rows(const Tensor& weight, int64_t missing);

// a' b to out; CUDA's products write float32 from half types as they are.
void write_product(const Tensor& a, const Tensor& b, Tensor& out);

// What takes the gradients of the parameters aside, if anything does: beside an x so small that
// the rest of backward leaves the card idle. Larger ones would take turns anyway, and keep memory.
SideWorkPtr side_work_for(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// A copy of a parameter in the type of x: the one at hand, or a new one.
Tensor in_type_of(const Tensor& x, const Tensor& parameter, const OptionalTensor& copy);

}  // namespace sinkhorn::ops
