#include "generate/slots.h"

#include <ATen/ops/gather.h>
#include <ATen/ops/where.h>

#include <vector>

namespace sinkhorn::generate {

void set_slots(const at::Tensor& to, const at::Tensor& slots, const at::Tensor& from) {
  to.index_copy_(0, slots, from);
}

void fill_slots(const at::Tensor& to, int64_t dim, const at::Tensor& slots, const at::Tensor& from,
                double rest) {
  const int64_t length = from.size(dim);
  set_slots(to.narrow(dim, 0, length), slots, from);
  to.narrow(dim, length, to.size(dim) - length).index_fill_(0, slots, rest);
}

void update_slots(const at::Tensor& to, const at::Tensor& chosen, const at::Tensor& from) {
  std::vector<int64_t> shape(static_cast<size_t>(to.dim()), 1);
  shape[0] = -1;
  to.copy_(at::where(chosen.view(shape), from, to));
}

void write_at(const at::Tensor& to, const at::Tensor& places, const at::Tensor& value,
              const at::Tensor& chosen) {
  const at::Tensor index = places.view({-1, 1, 1, 1}).expand(value.sizes());
  const at::Tensor old = at::gather(to, 2, index);
  to.scatter_(2, index, at::where(chosen.view({-1, 1, 1, 1}), value, old));
}

}  // namespace sinkhorn::generate
