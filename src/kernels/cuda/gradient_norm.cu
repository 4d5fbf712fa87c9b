// What is noted of a step between backward and the update: the norm of all gradients, whether it
// and the loss are finite, and what the gradients are to be divided by.
//
//   norm_i = |gradient_i|,  norm = sqrt(sum_i norm_i^2),  divisor = max(1, (norm + 1e-6) / clip)
//
// From the first step on whose norm or loss is not finite the divisor is not a number, which tells
// the optimizer to leave everything as it is, and nothing is added to the sums.
//
// A block sums the squares of a piece of one gradient (many.cuh) in float32. The block that ends
// last adds the pieces, always in the same order; only where the sum is not finite does it look at
// each gradient's pieces apart. Pieces grow with the model, so that there are never many more than
// kMostPieces.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/many.cuh"
#include "kernels/cuda/optimizer.h"

namespace sinkhorn::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kPacks = 4;  // of four numbers, that a thread asks for at once
constexpr int kSmallestPiece = kThreads * 8;
constexpr int64_t kMostPieces = 8192;
constexpr int kMostGradients = 180;
constexpr int kNone = 0x7FFFFFFF;

struct NoteArgs {
  Table<Gradient, kMostGradients> table;
  NoteParams p;
  int piece;
  int pieces;    // of all launches
  int begin;     // number of this launch's first gradient
  int before;    // pieces of earlier launches
  int* first;    // [p.count]: each gradient's first piece
  float* sums;   // [pieces]: of squares
  bool is_last;  // launch
};
static_assert(sizeof(NoteArgs) <= 4096 && kMostGradients <= kThreads);

int piece_of(const NoteParams& p) {
  int64_t all = 0;
  for (int i = 0; i < p.count; ++i) all += p.gradients[i].size;
  const int64_t share = (all + kMostPieces - 1) / kMostPieces;
  return pieces_of(share, kSmallestPiece) * kSmallestPiece;
}

int all_pieces(const NoteParams& p, int piece) {
  int all = 0;
  for (int i = 0; i < p.count; ++i) all += pieces_of(p.gradients[i].size, piece);
  return all;
}

__device__ __forceinline__ float sum_of_squares(const float* x, int size) {
  const int whole = size / 4 * 4, thread = static_cast<int>(threadIdx.x);
  float sum = 0.0f;
  for (int at = thread * 4; at < whole; at += kPacks * kThreads * 4) {
    float packs[kPacks][4] = {};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (at + i * kThreads * 4 < whole) load_pack(x + at + i * kThreads * 4, packs[i]);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum = fmaf(packs[i][j], packs[i][j], sum);
    }
  }
  const int rest = whole + thread;
  return rest < size ? fmaf(x[rest], x[rest], sum) : sum;
}

// Thread 0 gets the sum over the block.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kWarps];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x >= 32) return 0.0f;
  return warp_sum(threadIdx.x < kWarps ? sums[threadIdx.x] : 0.0f);
}

// What a step is added to.
struct Before {
  int64_t steps, failed_step;
  float loss, loss_sum, norm_sum;

  __device__ __forceinline__ explicit Before(const NoteParams& p)
      : steps(p.record->steps),
        failed_step(p.record->failed_step),
        loss(*p.loss),
        loss_sum(p.sums[0]),
        norm_sum(p.sums[1]) {}
};

__device__ __forceinline__ void write_note(const NoteParams& p, const Before& before, float norm,
                                           int bad) {
  StepRecord& record = *p.record;
  const int64_t step = before.steps + 1;
  record.steps = step;
  const bool fine = isfinite(norm) && isfinite(before.loss);
  if (!fine && before.failed_step == 0) {
    record.failed_step = step;
    record.failed_parameter = !isfinite(before.loss) ? -1 : bad == kNone ? -2 : bad;
  }
  if (!fine || before.failed_step != 0) {
    *p.divisor = __int_as_float(0x7FC00000);  // not a number
    return;
  }
  p.sums[0] = before.loss_sum + before.loss;
  p.sums[1] = before.norm_sum + norm;
  *p.divisor = p.clip > 0.0f ? fmaxf(1.0f, (norm + 1e-6f) / p.clip) : 1.0f;
}

// The first gradient whose squares have no finite sum, or kNone; thread 0 gets it. A warp takes a
// gradient at a time.
__device__ __noinline__ int first_broken(const NoteArgs& a) {
  __shared__ int broken[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int bad = kNone;
  for (int i = warp; i < a.p.count && bad == kNone; i += kWarps) {
    const int end = i + 1 < a.p.count ? __ldcg(a.first + i + 1) : a.pieces;
    float sum = 0.0f;
    for (int at = __ldcg(a.first + i) + lane; at < end; at += 32) sum += __ldcg(a.sums + at);
    if (!isfinite(warp_sum(sum))) bad = i;
  }
  if (lane == 0) broken[warp] = bad;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) bad = min(bad, broken[i]);
  return bad;
}

// By the whole block that ends last.
__device__ __forceinline__ void join(const NoteArgs& a) {
  const Before before(a.p);  // asked for while the sum is made
  float sum = 0.0f;
#pragma unroll 4
  for (int at = static_cast<int>(threadIdx.x); at < a.pieces; at += kThreads) {
    sum += __ldcg(a.sums + at);
  }
  const float norm = sqrtf(block_sum(sum));  // thread 0's
  const bool is_first = threadIdx.x == 0;
  int bad = kNone;
  if (__syncthreads_or(is_first && !isfinite(norm))) bad = first_broken(a);
  if (is_first) write_note(a.p, before, norm, bad);
}

__global__ void __launch_bounds__(kThreads)
    note_gradients_kernel(const __grid_constant__ NoteArgs a) {
  const Piece piece = piece_of_block(a.table, a.piece);
  const float sum =
      block_sum(sum_of_squares(a.table.items[piece.item].data + piece.begin, piece.size));
  if (threadIdx.x == 0) {
    const int number = a.before + static_cast<int>(blockIdx.x);
    a.sums[number] = sum;
    if (piece.begin == 0) a.first[a.begin + piece.item] = number;
  }
  if (!a.is_last) return;
  if (is_last_block(reinterpret_cast<unsigned*>(&a.p.record->arrived))) join(a);
}

}  // namespace

int64_t note_scratch(const NoteParams& p) {
  return (int64_t{p.count} + all_pieces(p, piece_of(p))) * 4;
}

void launch_note_gradients(const NoteParams& p, Stream stream) {
  NoteArgs a{};
  a.p = p;
  a.piece = piece_of(p);
  a.pieces = all_pieces(p, a.piece);
  a.first = static_cast<int*>(p.scratch);
  a.sums = static_cast<float*>(p.scratch) + p.count;
  by_tables<kMostGradients>(p.gradients, p.count, a.piece, [&](const auto& table, int begin) {
    a.table = table;
    a.begin = begin;
    a.is_last = begin + table.count == p.count;
    note_gradients_kernel<<<static_cast<unsigned>(table.blocks), kThreads, 0, stream>>>(a);
    check_launch("note_gradients");
    a.before += table.blocks;
  });
}

}  // namespace sinkhorn::cuda
