// Sorting keys and values by R, forward and backward; see sort.cpp.
#pragma once

#include "kernels/common/params.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/tiles.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

// Which blocks have a real token, and which have all b of theirs.
class BlockFlags {
 public:
  BlockFlags(int64_t batch, int64_t length, int64_t block, const uint8_t* real);
  ~BlockFlags() { free_scratch(flags_); }
  BlockFlags(const BlockFlags&) = delete;
  BlockFlags& operator=(const BlockFlags&) = delete;

  bool live(int64_t batch, int64_t block) const { return flags_[batch * blocks_ + block] & 1; }
  bool full(int64_t batch, int64_t block) const { return flags_[batch * blocks_ + block] & 2; }
  bool all_full(int64_t batch) const { return all_full_[batch]; }

 private:
  int64_t blocks_;
  uint8_t* flags_;
  uint8_t* all_full_;
};

// Sources of destination i by the causal rule alone: 0 .. source_end - 1.
SINKHORN_INLINE int64_t source_end(Causal causal, int64_t window, int64_t blocks, int64_t i) {
  switch (causal) {
    case Causal::kNone: return blocks;
    case Causal::kStrict: return max_of<int64_t>(0, i - window);
    case Causal::kInclusive: return i + 1;
  }
  return 0;
}
// The first destination that may read source j.
SINKHORN_INLINE int64_t first_reader(Causal causal, int64_t window, int64_t j) {
  switch (causal) {
    case Causal::kNone: return 0;
    case Causal::kStrict: return j + window + 1;
    case Causal::kInclusive: return j;
  }
  return 0;
}

// Whether the weights of a row may differ; the numbers of its row of SortParams::weight.
SINKHORN_INLINE bool weighs(const SortParams& p) {
  return p.real != nullptr || p.length % p.block != 0;
}
SINKHORN_INLINE int64_t weight_row(const SortParams& p) { return weighs(p) ? p.block + 1 : 2; }

// Heads [begin, end) of batch * heads.
struct HeadRange {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// Heads go group by group: f(heads, executor, memory) sorts and attends to a few at a time, so that
// what the sort writes is still in the cache when attention reads it, and the other way round in
// backward. memory holds `numbers` for each head of the group.
//
// Where there are heads enough for all workers, each takes whole heads: nothing passes from one
// core's cache to another's, and nobody waits. Otherwise all workers share a group that fits.
template <class T, class F>
void for_each_head_group(const SortParams& p, const Executor& executor, int64_t numbers,
                         const F& f) {
  constexpr int64_t kWorkerBytes = 2 << 20;
  const int64_t heads = p.batch * p.heads;
  if (heads % executor.workers == 0 || heads >= 8 * executor.workers) {
    const Executor alone{1, [](int, void (*body)(void*, int), void* context) { body(context, 0); }};
    for_each_task<T>(executor, heads, numbers,
                     [&](int64_t head, T* memory) { f(HeadRange{head, head + 1}, alone, memory); });
    return;
  }
  const int64_t bytes = 5 * p.length * p.width * static_cast<int64_t>(sizeof(T));
  const int64_t fit = executor.workers * kWorkerBytes / bytes;
  const int64_t group = max_of<int64_t>(1, min_of(heads, fit));
  const OwnScratch<T> memory(group * numbers);
  for (int64_t h = 0; h < heads; h += group) {
    f(HeadRange{h, min_of(heads, h + group)}, executor, memory.data());
  }
}

// What backward sends to the sorted copies of some heads, on its way through the sort.
template <class T>
class SortedGradients {
 public:
  // memory: numbers(p) for each of the heads.
  SortedGradients(const SortParams& p, HeadRange heads, T* memory)
      : rows_(p.rows * p.block),
        width_(p.width),
        first_(heads.begin),
        memory_(memory),
        value_(memory_ + heads.count() * rows_ * width_),
        weight_(value_ + heads.count() * rows_ * width_) {}
  static int64_t numbers(const SortParams& p) { return p.rows * p.block * (2 * p.width + 1); }

  T* key(int64_t head) const {
    return memory_ + (head - first_) * rows_ * width_;
  }  // [rows * b, D]
  T* value(int64_t head) const {
    return value_ + (head - first_) * rows_ * width_;
  }  // [rows * b, D]
  T* weight(int64_t head) const { return weight_ + (head - first_) * rows_; }  // [rows * b]

 private:
  int64_t rows_, width_, first_;
  T *memory_, *value_, *weight_;
};

template <class T>
void sort_fwd(const SortParams& p, const BlockFlags& flags, HeadRange heads,
              const Executor& executor);
template <class T>
void sort_bwd(const SortParams& p, const BlockFlags& flags, const SortedGradients<T>& sorted,
              HeadRange heads, const Executor& executor);

}  // namespace sinkhorn::cpu::SINKHORN_ISA
