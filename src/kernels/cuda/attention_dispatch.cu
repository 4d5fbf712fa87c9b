// The one table of which kernel takes a call of attention or sortcut.
//
// Forward                     for                                         CTA              measured
//   attention_fwd_cut         sortcut, rows * b <= 128                    128 queries         52 us
//   attention_fwd_sorting     a sort of up to 32 blocks of 64, an even    4 blocks       125, 107
//                             number of them; no window, or the block
//                             before under a causal rule
//   attention_fwd_plain       a sort, no window, 64 % b == 0, any D       64 queries         105
//                             a sort, b = 128                             128 queries        133
//                             a sort, b a larger multiple of 128          128 queries        342
//                             a window within the tile before, causal     64 queries          88
//                             a sort and such a window                    64 queries
//   attention_fwd             everything else                             64 queries         120
// Backward
//   attention_bwd_cut         sortcut, rows * b <= 128                    64 queries         109
//   attention_bwd_pair        a sort, no window, 64 % b == 0, any D       64 tokens          208
//                             a sort, no window, b = 128                  128 tokens         257
//   attention_bwd_long        a sort, no window, b = 256                  256 tokens         501
//   attention_bwd_together    no window, 64 % b == 0 or b = 128           64, 128 tokens   -, 495
//   attention_bwd_walk        a window within the tile before, causal,    a run of 64s       153
//                             with and without a sort
//   attention_bwd_queries,    everything else                             64 of either  252 + 253
//   attention_bwd_keys
//
// `sorting` sorts as well (16 blocks a head; with the sorted blocks kept for backward, and without;
// a sort of its own and `plain` take 182); an even number, so that the halves of a CTA take turns
// (attend_blocks). The others find sorted blocks in memory.
//
// Measured: on the H200, bf16, 65,536 tokens of 8 heads, D = 64; forward's `cut` and b = 64 at
// f665537 (`plain` then loaded by cp.async), the rest of `plain` at dd7af67, backward's `cut`,
// `pair`, `long` and `walk` after 5815d5b (b = 256: a sixteenth of 1,048,576 tokens; `pair` takes
// 210 at D = 128, where the general ones took 573); what these replaced (attention_fwd at a sort,
// `together`, the general ones at a window of 1) at 82822a9.
//
// `cut`, `sorting`, `plain`, `pair`, `long` and `walk` are Hopper's, for half types without masks,
// weights, dropout or rows on top of one another: the common cases (with a sort at b = 64 they move
// 3.8 TB/s of 4.1). `plain` and `pair` are for D <= 64 or where said so more, in tiles of
// 32 columns and up; the others for D in (32, 64]. `together` is for D <= 64 in half types. The
// rest is instantiated for widths 32, 64, 128 and 256 (for_engine), and for float32 to 128
// (for_float_engine). Key tiles are 64 positions throughout: with 128, D = 64 in backward takes
// more registers than two CTAs have.
#include "kernels/cuda/attention_cut.cuh"
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/sort.h"

namespace sinkhorn::cuda {
namespace {

bool is_half(const AttentionCall& call) {
  return call.type == Type::kBFloat16 || call.type == Type::kFloat16;
}

// What the kernels for the common cases ask of any call; most of them go no further than D = 64.
bool is_common(const AttentionCall& call, int widest = 64) {
  return is_half(call) && call.width <= widest && call.real == nullptr && call.weight == nullptr &&
         call.dropout.probability == 0.0 && call.sequences.start == nullptr &&
         call.sequences.length == nullptr && on_hopper();
}
// Not all of them have tiles of 32 columns.
bool is_narrow(const AttentionCall& call) { return call.width <= 32; }
// Whether all that is seen goes into one softmax.
bool has_one_softmax(const AttentionCall& call) {
  return call.rows == 0 || call.combine == Combine::kConcat;
}
bool fills_tiles(const AttentionCall& call) { return kTile % call.block == 0; }

bool takes_cut(const AttentionCall& call) {
  return call.sortcut && int64_t{call.rows} * call.block <= kCutPositions && is_common(call) &&
         !is_narrow(call);
}
bool takes_bwd_cut(const AttentionCall& call) {
  const auto fine = [&](const Tokens& x) { return can_describe(call, x, call.queries); };
  return takes_cut(call) && fine(call.query) && fine(call.grad_out) && fine(call.out);
}
// No window; a block is a tile, two tiles or a part of one.
bool sees_whole_tiles(const AttentionCall& call) {
  return !call.sortcut && call.window == 0 && has_one_softmax(call) &&
         (fills_tiles(call) || call.block == 2 * kTile);
}
bool takes_together(const AttentionCall& call) {
  return sees_whole_tiles(call) && is_half(call) && call.width <= 64;
}
// Two tiles a block leave no room for rows of more than 64 numbers.
bool takes_pair(const AttentionCall& call) {
  return sees_whole_tiles(call) && call.rows > 0 &&
         is_common(call, fills_tiles(call) ? kMaxWidth : 64) && can_describe(call);
}
// No window; a block is several pairs of tiles, and all of them are full.
bool takes_long(const AttentionCall& call) {
  return !call.sortcut && call.window == 0 && call.rows > 0 && has_one_softmax(call) &&
         call.block > 2 * kTile && call.block % (2 * kTile) == 0 && call.length % call.block == 0 &&
         is_common(call) && can_describe(call);
}
bool takes_bwd_long(const AttentionCall& call) {
  return call.block == kLongBlock && takes_long(call) && !is_narrow(call);
}
// A window that reaches no further than the tile before, and no later.
bool sees_tile_before(const AttentionCall& call) {
  return !call.sortcut && call.causal != Causal::kNone && fills_tiles(call) && call.window > 0 &&
         call.window <= kTile / call.block && has_one_softmax(call) && is_common(call) &&
         can_describe(call);
}
bool takes_plain(const AttentionCall& call) {
  return takes_pair(call) || takes_long(call) || sees_tile_before(call);
}
bool takes_walk(const AttentionCall& call) { return sees_tile_before(call) && !is_narrow(call); }

}  // namespace

bool covers_attention(const AttentionCall& call) {
  const bool is_float = call.type == Type::kFloat32;
  if ((!is_half(call) && !is_float) || call.width % 8 != 0 ||
      call.width > (is_float ? kMaxFloatWidth : kMaxWidth) || call.key_heads != call.heads) {
    return false;
  }
  // Backward in parts takes most: six tiles, and what it knows of two tiles of queries.
  int needed = 0;
  const auto count = [&]<class E>() {
    needed = 6 * E::kElements * static_cast<int>(sizeof(typename E::T)) + 4096;
  };
  if (is_float) {
    for_float_engine(call, count);
  } else {
    for_engine(call, count);
  }
  // The sort of many blocks, its undoing and dR.
  if (call.rows > 0 && call.blocks > kSmallBlocks) needed = std::max(needed, kSortSharedLeast);
  return needed <= most_shared();
}

// Blocks are tiles, and there is room for the clusters.
bool can_sort_itself(const AttentionCall& call) {
  return call.rows > 0 && call.block == kTile && call.length % kTile == 0 &&
         call.blocks <= kSortingBlocks && call.blocks % 2 == 0 && !is_narrow(call) &&
         (sees_whole_tiles(call) || sees_tile_before(call)) && is_common(call) &&
         can_describe(call) && can_describe(call, call.out, call.length) &&
         most_shared() >= kSortingShared && sorting_clusters(call) > 0;
}

void launch_attention_fwd(const AttentionCall& call, Stream stream) {
  if (call.type == Type::kFloat32) return launch_attention_fwd_float(call, stream);
  if (takes_cut(call)) return launch_attention_fwd_cut(call, stream);
  if (call.sorts) return launch_attention_fwd_sorting(call, stream);
  if (takes_plain(call)) return launch_attention_fwd_plain(call, stream);
  launch_attention_fwd_general(call, stream);
}

int sortcut_splits(const AttentionCall& call) {
  constexpr int kQueriesOfSplit = 1024, kMost = 64;
  constexpr int64_t kMostPartial = int64_t{1} << 28;  // bytes
  if (takes_bwd_cut(call)) return bwd_cut_splits(call);
  // Where many positions are sorted, they fill the card by themselves.
  const int64_t partial = int64_t{2} * call.batch * call.heads * call.rows * call.block *
                          call.width * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::clamp<int64_t>(kMostPartial / partial, 1, kMost);
  return static_cast<int>(std::clamp<int64_t>(call.queries / kQueriesOfSplit, 1, most));
}

bool keeps_delta(const AttentionCall& call) {
  return call.type == Type::kFloat32 ||
         !(takes_bwd_cut(call) || takes_pair(call) || takes_bwd_long(call) ||
           takes_together(call) || takes_walk(call));
}

void launch_attention_bwd(const AttentionCall& call, Stream stream) {
  if (call.type == Type::kFloat32) return launch_attention_bwd_float(call, stream);
  if (takes_bwd_cut(call)) return launch_attention_bwd_cut(call, stream);
  if (takes_pair(call)) return launch_attention_bwd_pair(call, stream);
  if (takes_bwd_long(call)) return launch_attention_bwd_long(call, stream);
  if (takes_together(call)) return launch_attention_bwd_together(call, stream);
  if (takes_walk(call)) return launch_attention_bwd_walk(call, stream);
  launch_attention_bwd_parts(call, stream);
}

}  // namespace sinkhorn::cuda
