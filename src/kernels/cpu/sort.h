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

// Heads [begin, end) of batch * heads.
struct HeadRange {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// Groups of heads small enough that what the sort writes is still in the cache when attention reads
// it, and the other way round in backward.
template <class T>
int64_t heads_to_a_group(const SortParams& p, const Executor& executor) {
  constexpr int64_t kWorkerBytes = 2 << 20;
  const int64_t bytes = 5 * p.length * p.width * static_cast<int64_t>(sizeof(T));
  return max_of<int64_t>(1, min_of(p.batch * p.heads, executor.workers * kWorkerBytes / bytes));
}
template <class T, class F>
void for_each_head_group(const SortParams& p, const Executor& executor, const F& f) {
  const int64_t heads = p.batch * p.heads, group = heads_to_a_group<T>(p, executor);
  for (int64_t h = 0; h < heads; h += group) f(HeadRange{h, min_of(heads, h + group)});
}

// What backward sends to the sorted copies of some heads, on its way through the sort.
template <class T>
class SortedGradients {
 public:
  SortedGradients(const SortParams& p, int64_t heads)
      : rows_(p.rows * p.block),
        width_(p.width),
        memory_(static_cast<T*>(
            allocate_scratch(sizeof(T) * static_cast<size_t>(heads * rows_ * (2 * width_ + 1))))),
        value_(memory_ + heads * rows_ * width_),
        weight_(value_ + heads * rows_ * width_) {}
  ~SortedGradients() { free_scratch(memory_); }
  SortedGradients(const SortedGradients&) = delete;
  SortedGradients& operator=(const SortedGradients&) = delete;

  // The buffers belong to heads first, first + 1, ... from now on.
  void start_at(int64_t first) { first_ = first; }

  T* key(int64_t head) const {
    return memory_ + (head - first_) * rows_ * width_;
  }  // [rows * b, D]
  T* value(int64_t head) const {
    return value_ + (head - first_) * rows_ * width_;
  }  // [rows * b, D]
  T* weight(int64_t head) const { return weight_ + (head - first_) * rows_; }  // [rows * b]

 private:
  int64_t rows_, width_, first_ = 0;
  T *memory_, *value_, *weight_;
};

template <class T>
void sort_fwd(const SortParams& p, const BlockFlags& flags, HeadRange heads,
              const Executor& executor);
template <class T>
void sort_bwd(const SortParams& p, const BlockFlags& flags, const SortedGradients<T>& sorted,
              HeadRange heads, const Executor& executor);

}  // namespace sinkhorn::cpu::SINKHORN_ISA
