// Sorting blocks by R and undoing it, on CUDA: products of N x N matrices with blocks of b * D
// numbers, on tensor cores.
#pragma once

#include "kernels/cuda/attention.h"

namespace sinkhorn::cuda {

// Heads of at most this many blocks sort with R in registers; more take a selected copy of it.
constexpr int kSmallBlocks = 64;
// Heads of at most this many sort without tensor cores.
constexpr int kTinyBlocks = 8;

// Bytes of shared memory that the kernels for more blocks ask for: tiles have 128 rows where a CTA
// may have so much, and 64 on smaller cards.
constexpr int kSortShared = 108 * 1024, kSortSharedLeast = 80 * 1024;

// R in the type of the tokens, [B, H, rows, selected_pitch]: 0 where not allowed. weighs: whether
// row_weight is made too.
constexpr int selected_pitch(int blocks) { return (blocks + 7) / 8 * 8; }
void launch_select(const AttentionCall& call, void* selected, bool weighs, Stream stream);

// weight [B, H, rows, b + 1]: the share of what is real at each sorted position, -1 where nothing
// is there, and the sum of the row behind them.
void launch_weight(const AttentionCall& call, Stream stream);

// sorted_key and sorted_value from key and value, and row_weight if launch_select did not make it.
// selected: null for heads of few blocks, here and below.
void launch_sort(const AttentionCall& call, const void* selected, Stream stream);

// For sorted blocks made by a library's product: adds up again, from the sources it reads, what is
// not finite. Under a causal rule a product carries NaN to rows that do not read it.
void launch_sort_repair(const AttentionCall& call, Stream stream);

// Before a library's product undoes the sort under a causal rule, and after the gradient of R: what
// is not finite in the gradients of the sorted blocks becomes 0, and NaN in grad_key or grad_value
// of the sources that its row reads. For calls without a mask whose blocks are all full.
void launch_undo_prepare(const AttentionCall& call, Stream stream);

// How many partial sums of the gradient of R launch_undo leaves.
int undo_splits(const AttentionCall& call);
// Adds what came through the sort to grad_key and grad_value (or begins them, in sortcut);
// partial [splits, B, H, rows, N]: the gradient of R through the sorted blocks.
void launch_undo(const AttentionCall& call, const void* selected, float* partial, int splits,
                 Stream stream);
// grad_sort [B, H, N, N] in the type of the sort: the partial sums, and what came through the
// weights (grad_weight in `weight_splits` partial sums); 0 where not allowed.
void launch_sort_grad(const AttentionCall& call, const float* partial, int splits,
                      int weight_splits, void* grad_sort, Stream stream);

// The sort of few rows (sort_few.cuh): whether these do it; then `selected` is not read, and
// launch_undo does the undoing. partial [splits, 2, B, H, rows * b, D], for more than one split.
constexpr int kFewRows = 8;
bool sorts_few(const AttentionCall& call);
int sort_few_splits(const AttentionCall& call);
void launch_sort_few(const AttentionCall& call, float* partial, int splits, Stream stream);

// What these choose for few rows, and for heads of few blocks.
int undo_few_splits(const AttentionCall& call);
void launch_undo_few(const AttentionCall& call, float* partial, Stream stream);
void launch_sort_small(const AttentionCall& call, Stream stream);
void launch_undo_small(const AttentionCall& call, float* partial, int splits, Stream stream);
int undo_small_splits(const AttentionCall& call);
void launch_sort_tiny(const AttentionCall& call, Stream stream);
void launch_undo_tiny(const AttentionCall& call, float* partial, int splits, Stream stream);
int undo_tiny_splits(const AttentionCall& call);
// CTAs that share `tiles` of columns among `groups` of them: enough to fill the card several times
// over, and few enough that loading R costs little beside the columns.
int sort_shares(int64_t groups, int tiles);

}  // namespace sinkhorn::cuda
