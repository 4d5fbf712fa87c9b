// Stands in for the kernels in a build without them: nothing is covered, so nothing is launched.
#include <stdexcept>

#include "kernels/cuda/balance.h"
#include "kernels/cuda/block_logits.h"
#include "kernels/cuda/cross_entropy.h"
#include "kernels/cuda/decode.h"
#include "kernels/cuda/embedding.h"
#include "kernels/cuda/feed_forward.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/optimizer.h"
#include "kernels/cuda/pool.h"
#include "kernels/cuda/sort.h"

namespace sinkhorn::cuda {
namespace {

[[noreturn]] void absent() { throw std::logic_error("this build has no CUDA kernels"); }

}  // namespace

bool covers_attention(const AttentionCall&) { return false; }
bool can_sort_itself(const AttentionCall&) { absent(); }
void launch_attention_fwd(const AttentionCall&, Stream) { absent(); }
void launch_attention_bwd(const AttentionCall&, Stream) { absent(); }
bool keeps_delta(const AttentionCall&) { absent(); }
int sortcut_splits(const AttentionCall&) { absent(); }

void launch_select(const AttentionCall&, void*, bool, Stream) { absent(); }
void launch_weight(const AttentionCall&, Stream) { absent(); }
void launch_sort(const AttentionCall&, const void*, Stream) { absent(); }
bool sorts_few(const AttentionCall&) { return false; }
int sort_few_splits(const AttentionCall&) { absent(); }
void launch_sort_few(const AttentionCall&, float*, int, Stream) { absent(); }
void launch_sort_repair(const AttentionCall&, Stream) { absent(); }
void launch_undo_prepare(const AttentionCall&, Stream) { absent(); }
int undo_splits(const AttentionCall&) { absent(); }
void launch_undo(const AttentionCall&, const void*, float*, int, Stream) { absent(); }
void launch_sort_grad(const AttentionCall&, const float*, int, int, void*, Stream) { absent(); }

bool covers_norm(int64_t, int64_t) { return false; }
int64_t norm_partials(int64_t, int64_t) { absent(); }
void launch_norm_fwd(const NormParams&, Stream) { absent(); }
void launch_norm_bwd(const NormParams&, Stream) { absent(); }
void launch_norm_sums(const NormParams&, Stream) { absent(); }
void launch_residual_fwd(const NormParams&, Stream) { absent(); }
void launch_residual_bwd(const NormParams&, Stream) { absent(); }

bool covers_feed_forward(int64_t, int64_t) { return false; }
int64_t feed_forward_partials(const FeedForwardParams&) { absent(); }
void launch_feed_forward_dropout(const FeedForwardParams&, Stream) { absent(); }
void launch_feed_forward_bwd(const FeedForwardParams&, Stream) { absent(); }
void launch_bias_partials(const FeedForwardParams&, Stream) { absent(); }
void launch_bias_sum(const FeedForwardParams&, Stream) { absent(); }

bool covers_block_logits(int64_t, int64_t, int64_t) { return false; }
void launch_block_logits_fwd(const BlockLogitsParams&, Stream) { absent(); }
void launch_block_logits_bwd(const BlockLogitsParams&, Stream) { absent(); }
bool covers_add_gumbel(int64_t) { return false; }
void launch_add_gumbel(const GumbelParams&, Stream) { absent(); }

bool covers_cross_entropy(int64_t, int64_t) { return false; }
void launch_target_count(const CrossEntropyParams&, Stream) { absent(); }
void launch_cross_entropy(const CrossEntropyParams&, Stream) { absent(); }
void launch_mean_loss(const CrossEntropyParams&, Stream) { absent(); }
void launch_scale(const ScaleParams&, Stream) { absent(); }

bool covers_embed(int64_t, int64_t, int64_t) { return false; }
bool covers_embed_sort(int64_t, int64_t) { return false; }
int64_t embed_partials(int64_t) { absent(); }
void launch_embed_fwd(const EmbedParams&, Stream) { absent(); }
void launch_embed_sort(const EmbedSort&, Stream) { absent(); }
void launch_embed_bwd(const EmbedGradient&, Stream) { absent(); }

bool covers_updates() { return false; }
int64_t note_scratch(const NoteParams&) { absent(); }
void launch_note_gradients(const NoteParams&, Stream) { absent(); }
void launch_adam(const AdamParams&, Stream) { absent(); }
void launch_copies(const Copy*, int, Type, Stream) { absent(); }

bool covers_decode(Type, int64_t) { return false; }
void launch_decode_keep(const DecodeKeepParams&, Stream) { absent(); }
void launch_decode_balance(const DecodeBalanceParams&, Stream) { absent(); }
int64_t decode_sort_partials(const DecodeState&, int64_t) { absent(); }
void launch_decode_sort(const DecodeSortParams&, Stream) { absent(); }
int decode_attend_splits(const DecodeState&, int64_t) { absent(); }
void launch_decode_attend(const DecodeAttendParams&, Stream) { absent(); }

bool covers_balance(const BalanceParams&) { return false; }
int64_t balance_fwd_scratch(const BalanceParams&) { absent(); }
int64_t balance_bwd_scratch(const BalanceParams&) { absent(); }
void launch_balance_fwd(const BalanceParams&, void*, Stream) { absent(); }
void launch_balance_bwd(const BalanceParams&, void*, Stream) { absent(); }

bool covers_pool(const PoolParams&) { return false; }
int64_t pool_scratch(const PoolParams&) { absent(); }
void launch_pool_fwd(const PoolParams&, void*, Stream) { absent(); }
void launch_pool_bwd(const PoolGradients&, Stream) { absent(); }

}  // namespace sinkhorn::cuda
