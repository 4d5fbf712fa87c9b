// Block attention: each query block against the block sorted into its place, the window's blocks
// and itself. The equations are in attention_tile.h and sort.cpp.
//
// Heads go in groups (sort.h). Forward: the sort, then tasks (head, block, query tile).
// Backward: tasks (head, block) write dQ, the gradients of the sorted copies, and add to dK, dV of
// the window's blocks. Blocks whose windows touch the same keys run in different rounds, so nothing
// is added to by two tasks at once and the order of every sum is fixed. Then the gradient passes
// through the sort.
#include "kernels/cpu/attention.h"

#include "kernels/cpu/table.h"

namespace sinkhorn::cpu::SINKHORN_ISA {
namespace {

// The runs that block i reads.
template <class T>
class BlockRuns {
 public:
  BlockRuns(const AttentionHead<T>& head, int64_t i) : h_(head), s_(head.p.sort), i_(i) {
    const int64_t own = tokens(i);
    once_ = own <= kQueryTile && s_.block <= kKeyTile &&
            (own == s_.block || s_.causal == Causal::kNone);
  }

  // Whether one pair of tiles covers a run, so that backward may write gradients instead of adding.
  bool once() const { return once_; }

  int64_t tokens(int64_t block) const { return min_of(s_.block, s_.length - block * s_.block); }
  int64_t first_block() const { return max_of<int64_t>(0, i_ - s_.window); }
  int64_t last_block() const {
    return s_.causal == Causal::kNone ? min_of(s_.blocks - 1, i_ + s_.window) : i_;
  }

  // Term 0 is the only softmax, or the sorted one of combine = outputs; term 1 is the local one.
  template <class F>
  void visit(int64_t term, const F& f) const {
    const bool separate = h_.terms() == 2;
    if (h_.sorts() && term == 0) {
      const KeyRun<T> run = sorted();
      if (run.length > 0) f(run);
      if (h_.p.combine == Combine::kLogits) return;
    }
    if (separate && term == 0) return;
    for (int64_t k = first_block(); k <= last_block(); ++k) f(local(k));
  }

  KeyRun<T> sorted() const {
    KeyRun<T> run = h_.sorted_run(i_);
    run.fresh = once_;
    if (h_.p.combine == Combine::kLogits) {
      run.add_own = true;
      run.own = s_.key;
      run.own_offset = offset_of(s_.key, h_.batch, h_.head, i_ * s_.block);
      run.own_length = tokens(i_);
      run.own_real = h_.key_real(i_ * s_.block);
    }
    return run;
  }

  KeyRun<T> local(int64_t k) const {
    KeyRun<T> run;
    const int64_t token = k * s_.block;
    run.key = s_.key;
    run.value = s_.value;
    run.key_offset = offset_of(s_.key, h_.batch, h_.head, token);
    run.value_offset = offset_of(s_.value, h_.batch, h_.head, token);
    run.length = tokens(k);
    run.real = h_.key_real(token);
    run.triangular = s_.causal != Causal::kNone && k == i_;
    run.fresh = once_ && s_.window == 0;
    run.slot = h_.dropout_block() * (1 + k - (i_ - s_.window));
    if (s_.grad_key != nullptr) {
      const int64_t at = (h_.index() * s_.length + token) * s_.width;
      run.grad_key = static_cast<T*>(s_.grad_key) + at;
      run.grad_value = static_cast<T*>(s_.grad_value) + at;
    }
    return run;
  }

 private:
  const AttentionHead<T>& h_;
  const SortParams& s_;
  int64_t i_;
  bool once_;
};

template <class T>
void begin_tile(const AttentionHead<T>& h, AttentionTile<T>& tile, int64_t token, int64_t offset,
                int64_t rows) {
  const uint64_t draws = static_cast<uint64_t>(h.dropout_block() * (2 + 2 * h.p.sort.window));
  tile.begin(rows, offset, static_cast<uint64_t>(h.index() * h.p.queries + token) * draws, draws);
}

template <class T>
void backward_block(const AttentionHead<T>& h, int64_t i, T* scratch) {
  const AttentionParams& p = h.p;
  const SortParams& s = p.sort;
  const BlockRuns<T> runs(h, i);
  const int64_t tokens = runs.tokens(i);
  const KeyRun<T> own = runs.local(i);
  const bool logits = h.sorts() && p.combine == Combine::kLogits;
  if (s.window == 0 && (logits || !runs.once())) {  // nobody else adds to this block
    fill(own.grad_key, tokens * s.width, T(0));
    fill(own.grad_value, tokens * s.width, T(0));
  }
  if (h.sorts()) {
    const KeyRun<T> sorted = runs.sorted();
    if (h.weighted) fill(sorted.grad_weight, s.block, T(0));
    if (sorted.length == 0 || !runs.once()) {
      fill(sorted.grad_key, s.block * s.width, T(0));
      fill(sorted.grad_value, s.block * s.width, T(0));
    }
  }
  const TileBuffers<T> buffers(s.width, scratch);
  AttentionTile<T> tile(buffers, static_cast<T>(p.scale), p.dropout);
  for (int64_t offset = 0; offset < tokens; offset += kQueryTile) {
    const int64_t rows = min_of(kQueryTile, tokens - offset), token = i * s.block + offset;
    begin_tile(h, tile, token, offset, rows);
    attention_bwd_tile(h, buffers, tile, token, rows,
                       [&](int64_t term, const auto& f) { runs.visit(term, f); });
  }
  if (logits) {  // the sum K' + K passes its gradient to both
    memcpy(own.grad_key, runs.sorted().grad_key, sizeof(T) * static_cast<size_t>(tokens * s.width));
  }
}

template <class T>
void forward_tile(const AttentionHead<T>& h, int64_t i, int64_t offset, T* scratch) {
  const SortParams& s = h.p.sort;
  const BlockRuns<T> runs(h, i);
  const int64_t rows = min_of(kQueryTile, runs.tokens(i) - offset), token = i * s.block + offset;
  if (rows <= 0) return;
  const TileBuffers<T> buffers(s.width, scratch);
  AttentionTile<T> tile(buffers, static_cast<T>(h.p.scale), h.p.dropout);
  begin_tile(h, tile, token, offset, rows);
  attention_fwd_tile(h, buffers, tile, token, rows,
                     [&](int64_t term, const auto& f) { runs.visit(term, f); });
}

// A forward that keeps no sorted copies for backward has them in memory of the group's: they never
// leave the cache.
template <class T>
AttentionParams with_copies(AttentionParams p, HeadRange heads, T* memory) {
  if (p.sort.sort.data == nullptr || p.sort.sorted_key != nullptr) return p;
  p.sort.sorted_key = memory;
  p.sort.sorted_value = memory + heads.count() * p.sort.rows * p.sort.block * p.sort.width;
  p.sort.sorted_first = heads.begin;
  return p;
}

template <class T>
void run_fwd(const AttentionParams& call, const Executor& all) {
  const SortParams& s = call.sort;
  const BlockFlags flags(s.batch, s.length, s.block, s.real);
  const int64_t tiles = (s.block + kQueryTile - 1) / kQueryTile, per_head = s.blocks * tiles;
  const bool keeps = s.sort.data == nullptr || s.sorted_key != nullptr;
  const int64_t copies = keeps ? 0 : 2 * s.rows * s.block * s.width;
  for_each_head_group<T>(s, all, copies, [&](HeadRange heads, const Executor& executor, T* memory) {
    const AttentionParams p = with_copies(call, heads, memory);
    if (s.sort.data != nullptr) sort_fwd<T>(p.sort, flags, heads, executor);
    for_each_task<T>(executor, heads.count() * per_head, TileBuffers<T>::count(s.width),
                     [&](int64_t task, T* scratch) {
                       const AttentionHead<T> h(p, heads.begin + task / per_head);
                       forward_tile(h, task % per_head / tiles, task % tiles * kQueryTile, scratch);
                     });
  });
}

// Rounds of blocks that add to different keys; see the top of the file.
template <class T>
void backward_blocks(const AttentionParams& p, const BlockFlags& flags,
                     const SortedGradients<T>& sorted, HeadRange heads, const Executor& executor) {
  const SortParams& s = p.sort;
  if (s.window > 0) {
    for_each_task<T>(executor, heads.count(), 0, [&](int64_t task, T*) {
      const int64_t numbers = s.length * s.width, at = (heads.begin + task) * numbers;
      fill(static_cast<T*>(s.grad_key) + at, numbers, T(0));
      fill(static_cast<T*>(s.grad_value) + at, numbers, T(0));
    });
  }
  const int64_t reach = s.causal == Causal::kNone ? 2 * s.window + 1 : s.window + 1;
  const int64_t rounds = min_of(reach, s.blocks);
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t blocks = (s.blocks - round + rounds - 1) / rounds;
    for_each_task<T>(executor, heads.count() * blocks, TileBuffers<T>::count(s.width),
                     [&](int64_t task, T* scratch) {
                       const AttentionHead<T> h(p, heads.begin + task / blocks, flags, sorted);
                       backward_block(h, task % blocks * rounds + round, scratch);
                     });
  }
}

template <class T>
void run_bwd(const AttentionParams& p, const Executor& all) {
  const SortParams& s = p.sort;
  const BlockFlags flags(s.batch, s.length, s.block, s.real);
  const int64_t numbers = s.sort.data == nullptr ? 0 : SortedGradients<T>::numbers(s);
  for_each_head_group<T>(s, all, numbers,
                         [&](HeadRange heads, const Executor& executor, T* memory) {
                           const SortedGradients<T> sorted(s, heads, memory);
                           backward_blocks<T>(p, flags, sorted, heads, executor);
                           if (s.sort.data != nullptr)
                             sort_bwd<T>(s, flags, sorted, heads, executor);
                         });
  clear_masked_gradients<T>(p, all);
}

}  // namespace

void attention_fwd(const AttentionParams& p, const Executor& executor) {
  p.sort.compute64 ? run_fwd<double>(p, executor) : run_fwd<float>(p, executor);
}
void attention_bwd(const AttentionParams& p, const Executor& executor) {
  p.sort.compute64 ? run_bwd<double>(p, executor) : run_bwd<float>(p, executor);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
