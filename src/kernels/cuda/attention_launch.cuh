// How attention's kernels are launched, and the widths they are instantiated for; which of them
// takes a call stands in attention_dispatch.cu.
//
// Widths 32, 64, 128 and, in half types, 256; another D runs in the next larger one, its columns
// filled with zeros. On Hopper 64 and 128 have products of their own, for half types, and so have
// 32 and 256 in kernels that are Hopper's alone. Tiles are 64 x 64 throughout: at D = 64 forward
// then needs 45 KB of shared memory and backward 64, so that four and three CTAs share a
// multiprocessor and hide each other's loads.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/engine.cuh"
#include "kernels/cuda/philox.cuh"

namespace sinkhorn::cuda {

inline Dropout dropout_of(const AttentionCall& call) {
  Dropout d;
  if (call.dropout.probability > 0.0) {
    d.threshold = static_cast<uint32_t>(call.dropout.probability * 65536.0 + 0.5);
    d.kept = static_cast<float>(1.0 / (1.0 - call.dropout.probability));
    d.rng = call.dropout.rng;
  }
  return d;
}

template <class Kernel, class... Arguments>
void launch(const char* name, Kernel kernel, dim3 grid, int threads, int shared, Stream stream,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared(kernel, shared, name);
  kernel<<<grid, threads, shared, stream>>>(arguments...);
  check_launch(name);
}

inline int64_t numbers_of(const AttentionCall& call) {  // of a tensor of tokens
  return int64_t{call.batch} * call.heads * call.length * call.width;
}

// Whether the current card has Hopper's instructions and SINKHORN_CUDA_PORTABLE is not set in the
// environment, which asks for the portable kernels on any card.
bool on_hopper();

int multiprocessors();  // of the current card
// Bytes of shared memory that a CTA may ask of it; no more than SINKHORN_CUDA_SHARED_KB in the
// environment says, so that what smaller cards run can be tested on a larger one.
int most_shared();

// f.template operator()<T>() for the call's half type.
template <class F>
void for_half_type(const AttentionCall& call, F f) {
  if (call.type == Type::kBFloat16) {
    f.template operator()<__nv_bfloat16>();
  } else {
    f.template operator()<__half>();
  }
}

// f.template operator()<Engine>() for the call's half type and width, on this card.
template <class F>
void for_engine(const AttentionCall& call, F f) {
  for_half_type(call, [&]<class T>() {
    if (call.width <= 32) {
      f.template operator()<Portable<T, 32>>();
    } else if (call.width <= 64) {
      if (on_hopper()) return f.template operator()<Hopper<T, 64>>();
      f.template operator()<Portable<T, 64>>();
    } else if (call.width <= 128) {
      if (on_hopper()) return f.template operator()<Hopper<T, 128>>();
      f.template operator()<Portable<T, 128>>();
    } else {
      f.template operator()<Portable<T, 256>>();
    }
  });
}
// The same for kernels that are Hopper's alone, and go to D = kWidest.
template <int kWidest, class F>
void for_hopper_engine(const AttentionCall& call, F f) {
  for_half_type(call, [&]<class T>() {
    if (call.width <= 32) {
      f.template operator()<Hopper<T, 32>>();
    } else if (call.width <= 64) {
      f.template operator()<Hopper<T, 64>>();
    } else if (call.width <= 128) {
      f.template operator()<Hopper<T, 128>>();
    } else if constexpr (kWidest > 128) {
      f.template operator()<Hopper<T, 256>>();
    }
  });
}

// The same for float32, whose tiles are twice as large: six of 256 columns would not fit.
constexpr int kMaxFloatWidth = 128;
template <class F>
void for_float_engine(const AttentionCall& call, F f) {
  if (call.width <= 32) {
    f.template operator()<Portable<float, 32>>();
  } else if (call.width <= 64) {
    f.template operator()<Portable<float, 64>>();
  } else {
    f.template operator()<Portable<float, kMaxFloatWidth>>();
  }
}

inline int tiles_of(int positions) { return (positions + kTile - 1) / kTile; }

// How many CTAs share the `tiles` of each of `heads`, where `slots` CTAs run at a time: as many as
// finish first. Beginning and ending one takes as long as two tiles.
inline int even_shares(int64_t heads, int tiles, int slots) {
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

// Blocks of a head that attention_fwd_sorting goes to, and bytes of shared memory that it asks for
// at most.
constexpr int kSortingBlocks = 32, kSortingShared = 227 * 1024;

// The block that attention_bwd_long is for.
constexpr int kLongBlock = 4 * kTile;

// The ways to do it, chosen in attention_dispatch.cu.
void launch_attention_fwd_general(const AttentionCall& call, Stream stream);
void launch_attention_fwd_plain(const AttentionCall& call, Stream stream);
void launch_attention_fwd_sorting(const AttentionCall& call, Stream stream);
int sorting_clusters(const AttentionCall& call);  // that the card has room for at a time
void launch_attention_fwd_float(const AttentionCall& call, Stream stream);
void launch_attention_bwd_parts(const AttentionCall& call, Stream stream);
void launch_attention_bwd_together(const AttentionCall& call, Stream stream);
void launch_attention_bwd_pair(const AttentionCall& call, Stream stream);
void launch_attention_bwd_long(const AttentionCall& call, Stream stream);
void launch_attention_bwd_walk(const AttentionCall& call, Stream stream);
void launch_attention_bwd_float(const AttentionCall& call, Stream stream);

}  // namespace sinkhorn::cuda
