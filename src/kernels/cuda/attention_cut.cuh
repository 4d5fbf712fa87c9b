// The common case of sortcut on Hopper: D in (32, 64], at most 128 sorted positions (budget * b),
// no mask, no short block, no dropout. Every query of a head then sees the same one or two tiles of
// keys and values, which stay in shared memory while a CTA walks over the queries:
//
//   forward    attention_fwd_cut.cuh    reads q, writes out
//   backward   attention_bwd_cut.cuh    reads q, dO and O, writes dq
//
// Both are bound by memory, and read and write each token once.
#pragma once

#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

constexpr int kCutPositions = 2 * kTile;

void launch_attention_fwd_cut(const AttentionCall& call, Stream stream);

// Parts of a head's queries, each with its own sum of dk and dv.
int bwd_cut_splits(const AttentionCall& call);
void launch_attention_bwd_cut(const AttentionCall& call, Stream stream);

}  // namespace sinkhorn::cuda
