// The operators of Sparse Sinkhorn Attention for C++: option structs over the dispatcher operators
// that Python calls as torch.ops.sinkhorn.*. Differentiable, CPU and CUDA, float32, float64,
// bfloat16 and float16. Shapes: B batch, H heads, L tokens, D head width, N = ceil(L / block)
// blocks. Misuse throws c10::ValueError with the offending values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace sinkhorn {

struct PoolOptions {
  int64_t block = 64;
  std::string mode = "mean";         // sum, mean; recent (causal only)
  bool causal = false;               // pool everything up to the block's first token
  std::optional<at::Tensor> mask{};  // [B, L] bool, true = real token
};

// x [B, L, E] -> [B, N, E].
at::Tensor pool(const at::Tensor& x, const PoolOptions& options = {});

struct BalanceOptions {
  int64_t iterations = 5;
  double temperature = 0.75;
  std::string causal = "none";             // none, strict, inclusive
  std::string columns = "full";            // full, prefix, prior, none
  int64_t window = 0;                      // strict only: sources lie before the window
  std::optional<at::Tensor> noise{};       // [B, H, N, N], added to the logits
  std::optional<at::Tensor> block_mask{};  // [B, N] bool, true = the block has a real token
};

// logits [B, H, N, N] -> the relaxed permutation R; row = destination, column = source.
at::Tensor balance(const at::Tensor& logits, const BalanceOptions& options = {});

struct AttentionOptions {
  int64_t block = 64;
  std::string causal = "none";       // none, strict, inclusive
  std::string combine = "concat";    // concat, logits, outputs
  int64_t window = 0;                // blocks beside the own one in the local term
  std::optional<at::Tensor> mask{};  // [B, L] bool, true = real token
  std::optional<double> scale{};     // 1 / sqrt(D) by default
  double dropout_p = 0.0;
};

// query, key, value [B, H, L, D], sort [B, H, N, N] -> [B, H, L, D]. Without a sort: block-local or
// sliding-window attention.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& sort, const AttentionOptions& options = {});

struct SortcutOptions {
  int64_t block = 64;
  int64_t budget = 2;                // sorted blocks that every query sees
  std::optional<at::Tensor> mask{};  // [B, L] bool, of the keys
  std::optional<double> scale{};     // 1 / sqrt(D) by default
  double dropout_p = 0.0;
};

// query [B, H, Lq, D], key, value [B, H, L, D], sort [B, H, N, N] -> [B, H, Lq, D].
at::Tensor sortcut(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& sort, const SortcutOptions& options = {});

// The CPU kernels in use: "baseline", "avx2" or "avx512". The environment variable SINKHORN_CPU
// forces one.
std::string cpu_form();

}  // namespace sinkhorn
