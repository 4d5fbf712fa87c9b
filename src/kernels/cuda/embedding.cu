// The embedding: rows of a table, and their gradient added onto one that the table has already.
//
//   x[t] = positions[t mod L] + scale W[ids[t]]
//   dW[v] += scale * sum over tokens t with ids[t] = v of dx[t]
//   ids [B * L]; positions [L, E]; x, dx [B * L, E]; W, dW [V, E]; float32
//
// Forward: a block takes a token, a thread four columns of it.
//
// Backward reads the tokens in the order of their ids, so that the tokens of one id are a run. The
// sorted tokens are cut into pieces of equal length, whatever runs they hold: 24,576 bytes of 259
// kinds keep as many threads busy as 16,384 tokens of 32,000. A thread walks over a piece and adds
// up four columns run by run, in order. A run within the piece goes onto the table at once; nobody
// else has it. Of a run that is cut, each piece leaves a partial sum: that of the piece's beginning
// in heads, or, where the run begins in the piece, that of its end in tails. A second kernel adds
// up the parts of each cut run, in a fixed order, and puts the sum onto the table. Nothing is
// multiplied by 0: a token that is not finite breaks its own id's row and no other.
//
// Few tokens are sorted by counting: a token's place is the number of keys id * tokens + token that
// are smaller than its own. That compares each with each, but all of them at once: at 4,096 tokens
// a radix sort, which has work for one block only, takes several times as long.
#include <algorithm>
#include <limits>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/embedding.h"
#include "kernels/cuda/lanes.cuh"

namespace sinkhorn::cuda {
namespace {

// Tokens of a piece: many small pieces fill the card where there are few tokens.
constexpr int64_t kShortestPiece = 8, kUsualPiece = 32;
constexpr int64_t kEnoughPieces = 512, kMostPieces = 2048;
constexpr int kPieceThreads = 128;
constexpr int kAhead = 4;      // tokens that a thread asks for at once
constexpr int kJoinWarps = 8;  // that share the parts of a cut run
constexpr int kMostSorted = 8192, kSortThreads = 256;
constexpr int kTokensPerWarp = 4, kTokensPerSort = kSortThreads / 32 * kTokensPerWarp;

__global__ void __launch_bounds__(256) embed_fwd_kernel(const __grid_constant__ EmbedParams p) {
  const int64_t id = p.ids[blockIdx.x];
  const bool known = id >= 0 && id < p.rows;
  const int64_t place = blockIdx.x % static_cast<unsigned>(p.length);
  const float* positions = p.positions + place * p.width;
  const float* row = p.table + (known ? id : 0) * p.width;
  float* out = p.out + blockIdx.x * p.width;
#pragma unroll 2
  for (int64_t column = 4 * threadIdx.x; column < p.width; column += 4 * blockDim.x) {
    float x[4], y[4];
    load_pack<4>(row + column, x);
    load_pack<4>(positions + column, y);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y[k] = known ? fmaf(p.scale, x[k], y[k]) : std::numeric_limits<float>::quiet_NaN();
    }
    store_pack<4>(out + column, y);
  }
}

// A block finds the places of kTokensPerSort tokens among all, which it holds as keys; a warp
// compares kTokensPerWarp of them with four keys a lane at a time.
__global__ void __launch_bounds__(kSortThreads)
    embed_sort_kernel(const __grid_constant__ EmbedSort p) {
  constexpr int kAtOnce = 4 * 32;
  static_assert(kMostSorted % kAtOnce == 0 && kAtOnce % kTokensPerSort == 0);
  __shared__ uint4 keys[kMostSorted / 4];
  uint32_t* key = reinterpret_cast<uint32_t*>(keys);
  const int tokens = static_cast<int>(p.tokens), rows = static_cast<int>(p.rows);
  const int padded = (tokens + kAtOnce - 1) / kAtOnce * kAtOnce;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x); i < padded; i += kSortThreads) {
    const int64_t id = p.ids[min(i, tokens - 1)];
    // All that are not in the table count as the first id behind it.
    const auto row = static_cast<uint32_t>(id >= 0 && id < rows ? id : rows);
    key[i] = i < tokens ? row * static_cast<uint32_t>(tokens) + static_cast<uint32_t>(i)
                        : std::numeric_limits<uint32_t>::max();
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(blockIdx.x) * kTokensPerSort +
                    static_cast<int>(threadIdx.x) / 32 * kTokensPerWarp;
  uint32_t mine[kTokensPerWarp], smaller[kTokensPerWarp] = {};
#pragma unroll
  for (int k = 0; k < kTokensPerWarp; ++k) mine[k] = key[first + k];
#pragma unroll 4
  for (int i = lane; i < padded / 4; i += 32) {
    const uint4 x = keys[i];
#pragma unroll
    for (int k = 0; k < kTokensPerWarp; ++k) {
      smaller[k] += (x.x < mine[k]) + (x.y < mine[k]) + (x.z < mine[k]) + (x.w < mine[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kTokensPerWarp; ++k) {
    const uint32_t place = __reduce_add_sync(0xFFFFFFFFu, smaller[k]);
    if (lane != k || first + k >= tokens) continue;
    p.sorted[place] = static_cast<int32_t>(mine[k] / static_cast<uint32_t>(tokens));
    p.order[place] = first + k;
  }
}

struct Pieces {
  EmbedGradient p;
  int64_t length, count;  // of the pieces

  __device__ __forceinline__ float* head(int64_t piece) const {
    return p.partial + piece * p.width;
  }
  __device__ __forceinline__ float* tail(int64_t piece) const { return head(count + piece); }
  __device__ __forceinline__ bool known(int64_t id) const { return id >= 0 && id < p.rows; }
};

__device__ __forceinline__ void add_scaled(float scale, const float (&sum)[4], float (&onto)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) onto[k] = fmaf(scale, sum[k], onto[k]);
}

// Thread (x, y) of block (i, j): columns 4 (i * blockDim.x + x) .. + 3 of piece j * blockDim.y + y.
template <class Id>
__global__ void __launch_bounds__(kPieceThreads)
    embed_bwd_kernel(const __grid_constant__ Pieces pieces) {
  const EmbedGradient& p = pieces.p;
  const int64_t column = 4 * (int64_t{blockIdx.x} * blockDim.x + threadIdx.x);
  const int64_t piece = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  if (column >= p.width || piece >= pieces.count) return;
  const int64_t begin = piece * pieces.length, end = min(begin + pieces.length, p.tokens);
  const Id* ids = static_cast<const Id*>(p.ids);
  const float* grad = p.grad + column;
  float* table = p.table + column;
  float sum[4] = {};
  bool begun_before = begin > 0 && ids[begin - 1] == ids[begin];  // the run at hand
  for (int64_t first = begin; first < end; first += kAhead) {
    int64_t id[kAhead], token[kAhead];
    bool ends[kAhead];  // a run, with this token
    float row[kAhead][4], onto[kAhead][4] = {};
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      // Behind the end the last token again: a branch would wait for what was asked for before.
      const int64_t i = min(first + k, end - 1);
      id[k] = ids[i];
      token[k] = p.order[i];
      ends[k] = i + 1 == p.tokens || ids[min(i + 1, p.tokens - 1)] != id[k];
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      load_pack<4>(grad + token[k] * p.width, row[k]);
      if (ends[k] && pieces.known(id[k])) load_own_pack<4>(table + id[k] * p.width, onto[k]);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k >= end) break;
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += row[k][c];
      if (!ends[k]) continue;
      if (begun_before) {
        store_pack<4>(pieces.head(piece) + column, sum);
      } else if (pieces.known(id[k])) {
        add_scaled(p.scale, sum, onto[k]);
        store_pack<4>(table + id[k] * p.width, onto[k]);
      }
      begun_before = false;
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = 0.0f;
    }
  }
  if (end == p.tokens || ids[end] != ids[end - 1]) return;
  store_pack<4>((begun_before ? pieces.head(piece) : pieces.tail(piece)) + column, sum);
}

// Block (i, j): the run that begins in piece j and goes on behind it, if there is one; thread x of
// a warp takes columns 128 i + 4 x .. + 3, warp y every kJoinWarps-th of the later pieces.
template <class Id>
__global__ void __launch_bounds__(32 * kJoinWarps)
    embed_join_kernel(const __grid_constant__ Pieces pieces) {
  begin_early();
  __shared__ float4 shared[kJoinWarps][32];
  const EmbedGradient& p = pieces.p;
  const Id* ids = static_cast<const Id*>(p.ids);
  const int64_t piece = blockIdx.y, begin = piece * pieces.length, end = begin + pieces.length;
  if (end >= p.tokens) return;  // all these are the same for the whole block
  const Id id = ids[end];
  if (!pieces.known(id) || ids[end - 1] != id || (begin > 0 && ids[begin - 1] == id)) return;

  // Ids ascend, so the pieces that begin with this one follow each other.
  constexpr int kThreads = 32 * kJoinWarps;
  const int64_t mine = threadIdx.y * 32 + threadIdx.x;
  int64_t parts = 0;
  for (int found = kThreads; found == kThreads; parts += found) {
    const int64_t start = (piece + 1 + parts + mine) * pieces.length;
    found = __syncthreads_count(start < p.tokens && ids[start] == id);
  }

  const int64_t column = 128 * int64_t{blockIdx.x} + 4 * threadIdx.x;
  float sum[4] = {};
  if (column < p.width) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += kJoinWarps) {
      float x[4];
      load_pack<4>(pieces.head(piece + 1 + part) + column, x);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += x[c];
    }
  }
  shared[threadIdx.y][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  float total[4], onto[4];
  float* row = p.table + id * p.width + column;
  load_pack<4>(pieces.tail(piece) + column, total);
  load_own_pack<4>(row, onto);
#pragma unroll
  for (int y = 0; y < kJoinWarps; ++y) {
    const float4 x = shared[y][threadIdx.x];
    total[0] += x.x;
    total[1] += x.y;
    total[2] += x.z;
    total[3] += x.w;
  }
  add_scaled(p.scale, total, onto);
  store_pack<4>(row, onto);
}

int64_t piece_length(int64_t tokens) {
  const int64_t even = (tokens + kEnoughPieces - 1) / kEnoughPieces;
  return std::max(std::clamp(even, kShortestPiece, kUsualPiece),
                  (tokens + kMostPieces - 1) / kMostPieces);
}

int64_t piece_count(int64_t tokens) {
  const int64_t length = piece_length(tokens);
  return (tokens + length - 1) / length;
}

template <class Id>
void start_bwd(const Pieces& pieces, Stream stream) {
  const int64_t packs = pieces.p.width / 4;
  unsigned wide = 1;  // threads to a piece: narrow tables put several pieces into a block
  while (wide < kPieceThreads && wide < packs) wide *= 2;
  const unsigned high = kPieceThreads / wide;
  const auto count = static_cast<unsigned>(pieces.count);
  const dim3 grid(static_cast<unsigned>((packs + wide - 1) / wide), (count + high - 1) / high);
  embed_bwd_kernel<Id><<<grid, dim3(wide, high), 0, stream>>>(pieces);
  check_launch("embed_bwd");
  if (count == 1) return;
  const dim3 join_grid(static_cast<unsigned>((packs + 31) / 32), count - 1);
  launch_early(pieces.p.tokens * pieces.p.width, "embed_bwd join", embed_join_kernel<Id>, join_grid,
               dim3(32, kJoinWarps), 0, stream, pieces);
}

}  // namespace

bool covers_embed(int64_t tokens, int64_t rows, int64_t width) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return tokens > 0 && tokens <= kMost && rows > 0 && rows <= kMost && width > 0 &&
         width % 4 == 0 && width <= kMost;
}

bool covers_embed_sort(int64_t tokens, int64_t rows) {
  // Keys of 32 bits, of rows + 1 kinds of ids; the largest number is no key.
  return tokens <= kMostSorted && (rows + 1) * tokens <= std::numeric_limits<uint32_t>::max();
}

int64_t embed_partials(int64_t tokens) { return 2 * piece_count(tokens); }

void launch_embed_fwd(const EmbedParams& p, Stream stream) {
  const auto warps = static_cast<unsigned>(std::clamp<int64_t>((p.width / 4 + 31) / 32, 1, 8));
  embed_fwd_kernel<<<static_cast<unsigned>(p.tokens), 32 * warps, 0, stream>>>(p);
  check_launch("embed_fwd");
}

void launch_embed_sort(const EmbedSort& p, Stream stream) {
  const auto blocks = static_cast<unsigned>((p.tokens + kTokensPerSort - 1) / kTokensPerSort);
  embed_sort_kernel<<<blocks, kSortThreads, 0, stream>>>(p);
  check_launch("embed_bwd sort");
}

void launch_embed_bwd(const EmbedGradient& p, Stream stream) {
  const Pieces pieces{p, piece_length(p.tokens), piece_count(p.tokens)};
  p.narrow ? start_bwd<int16_t>(pieces, stream) : start_bwd<int32_t>(pieces, stream);
}

}  // namespace sinkhorn::cuda
