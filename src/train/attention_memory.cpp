#include "train/attention_memory.h"

#include <ATen/ATen.h>

#include <cmath>
#include <fstream>
#include <string>

#include "sinkhorn/error.h"
#include "sinkhorn/ops.h"
#include "train/device.h"

namespace sinkhorn::train {
namespace {

// A line of /proc/self/status, "VmRSS" or "VmHWM", in bytes.
int64_t status_bytes(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  throw Error("/proc/self/status: has no " + name + "; memory cannot be measured here");
}

// What is held now, from where a later peak counts.
int64_t mark(at::Device device) {
  if (device.is_cuda()) return peak_memory(device);
  std::ofstream("/proc/self/clear_refs") << "5";  // resets VmHWM
  return status_bytes("VmRSS");
}

int64_t peak(at::Device device) {
  return device.is_cuda() ? peak_memory(device) : status_bytes("VmHWM");
}

at::Tensor forward(const AttentionProbe& probe, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const at::Tensor& logits) {
  if (probe.kind == "scores") {
    const double scale = 1 / std::sqrt(static_cast<double>(probe.width));
    return at::matmul(at::softmax(at::matmul(q * scale, k.transpose(-2, -1)), -1), v);
  }
  if (probe.kind == "fused") return at::scaled_dot_product_attention(q, k, v);
  const at::Tensor sort = balance(logits);
  if (probe.kind == "sinkhorn") return attention(q, k, v, sort, {.block = probe.block});
  if (probe.kind == "sortcut") {
    return sortcut(q, k, v, sort, {.block = probe.block, .budget = probe.budget});
  }
  throw UsageError("\"" + probe.kind + "\" is not one of scores, fused, sinkhorn, sortcut");
}

}  // namespace

int64_t attention_memory(const AttentionProbe& probe) {
  const at::Device device = pick_device(probe.device);
  const auto type = device.is_cuda() ? at::kBFloat16 : at::kFloat;
  const auto options = at::TensorOptions().device(device).dtype(type);
  const auto draw = [&](int64_t length) {
    return at::randn({1, probe.heads, length, probe.width}, options).requires_grad_(true);
  };
  const at::Tensor q = draw(probe.length), k = draw(probe.length), v = draw(probe.length);
  const int64_t blocks = (probe.length + probe.block - 1) / probe.block;
  const at::Tensor logits =
      at::randn({1, probe.heads, blocks, blocks}, options.dtype(at::kFloat)).requires_grad_(true);
  const int64_t before = mark(device);
  forward(probe, q, k, v, logits).sum().backward();
  return peak(device) - before;
}

}  // namespace sinkhorn::train
