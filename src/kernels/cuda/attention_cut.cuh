// The common case of sortcut on Hopper: D in (32, 64], at most 128 sorted positions (budget * b),
// no mask, no short block, no dropout. Every query of a head then sees the same one or two tiles of
// keys and values, which stay in shared memory while a CTA walks over the queries:
//
//   forward    attention_fwd_cut.cuh    reads q, writes out
//   backward   attention_bwd_cut.cuh    reads q, dO and O, writes dq
//
// Both are bound by memory, and read and write each token once.
#pragma once

#include <algorithm>

#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

constexpr int kCutPositions = 2 * kTile;

bool covers_cut(const AttentionCall& call);

void launch_attention_fwd_cut(const AttentionCall& call, Stream stream);

// Parts of a head's queries, each with its own sum of dk and dv.
int bwd_cut_splits(const AttentionCall& call);
void launch_attention_bwd_cut(const AttentionCall& call, Stream stream);

// How many CTAs share the `tiles` of each of `heads`, where `slots` CTAs run at a time: as many as
// finish first. Beginning and ending one takes as long as two tiles.
inline int cut_shares(int64_t heads, int tiles, int slots) {
  constexpr int kOverhead = 2;
  int best = 1;
  int64_t least = 0;
  for (int shares = 1; shares <= std::min(tiles, slots); ++shares) {
    const int64_t rounds = (heads * shares + slots - 1) / slots;
    const int64_t time = rounds * ((tiles + shares - 1) / shares + kOverhead);
    if (shares == 1 || time < least) {
      least = time;
      best = shares;
    }
  }
  return best;
}

}  // namespace sinkhorn::cuda
