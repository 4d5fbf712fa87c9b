// Sums down the columns of a crew (balance_crew.cuh): of up to two numbers a column, which all its
// warps have a part of. They are added over the warps of a CTA in its shared memory. Then each CTA
// writes its parts to global memory, waits until all of the crew have, and adds the parts of all
// columns itself, in the order of their ranks. So the CTAs of a crew must run at the same time. (A
// cluster of CTAs, with parts in each other's shared memory, takes as long a step and leaves a part
// of the card empty: of 16 CTAs there is room for 7, on 112 of 132 multiprocessors.)
#pragma once

#include "kernels/cuda/balance_crew.cuh"

namespace sinkhorn::cuda::balance {

// kStaged: numbers that a warp has room for.
template <class Shape, int kStaged>
class CrewExchange {
 public:
  struct alignas(16) Memory {
    float stage[Shape::kWarps][kStaged];
  };
  // Two sets of parts in turn: who writes to one again has passed the barrier of the other, which
  // the others come to when they have read this one.
  static constexpr int kSets = 2;
  static constexpr int64_t kOfSet = int64_t{2} * Shape::kCtas * Shape::kColumns;  // numbers

  __device__ __forceinline__ CrewExchange(const CrewArgs& t, const CrewPlace<Shape>& at,
                                          Memory& memory)
      : at_(at),
        memory_(memory),
        parts_(t.parts + at.crew * (kSets * kOfSet)),
        arrivals_(t.arrivals + at.head) {}

  // make(g, rows, numbers) says what this warp found of a group of its columns; add(values, value)
  // merges what the warps and then the CTAs found, beginning with `none`; finish(column, values) is
  // called once in each CTA for each column, and what it writes to shared memory is there for all
  // threads of the CTA behind this.
  template <int kCount, class Make, class Add, class Finish>
  __device__ __forceinline__ void merge(const Held<Shape>& held, const float (&none)[kCount],
                                        const Make& make, const Add& add, const Finish& finish) {
    float* parts = parts_ + turn_ % kSets * kOfSet;
    merge_warps<0>(held, none, make, add, parts);
    wait_for_crew();
    for (int column = threadIdx.x; column < Shape::kColumns; column += Shape::kThreads) {
      constexpr int kMost = 16 / kCount, kAhead = kMost < Shape::kCtas ? kMost : Shape::kCtas;
      float all[kCount];
#pragma unroll
      for (int a = 0; a < kCount; ++a) all[a] = none[a];
#pragma unroll 1
      for (int first = 0; first < Shape::kCtas; first += kAhead) {
        float values[kAhead][kCount];  // in flight together
#pragma unroll
        for (int q = 0; q < kAhead; ++q) {
#pragma unroll
          for (int a = 0; a < kCount; ++a) {
            values[q][a] = __ldcg(place(parts, a, first + q, column));
          }
        }
#pragma unroll
        for (int q = 0; q < kAhead; ++q) add(all, values[q]);
      }
      finish(column, all);
    }
    __syncthreads();
  }
  // The same of sums.
  template <int kCount, class Make, class Finish>
  __device__ __forceinline__ void sum(const Held<Shape>& held, const Make& make,
                                      const Finish& finish) {
    constexpr float kNone[kCount] = {};
    const auto add = [](float(&all)[kCount], const float(&own)[kCount]) {
#pragma unroll
      for (int a = 0; a < kCount; ++a) all[a] += own[a];
    };
    merge(held, kNone, make, add, finish);
  }

 private:
  __device__ __forceinline__ static float* place(float* parts, int a, int rank, int column) {
    return parts + (a * Shape::kCtas + rank) * Shape::kColumns + column;
  }

  // Over the warps, from column kFirst on, as many columns at a time as there is room for.
  template <int kFirst, int kCount, class Make, class Add>
  __device__ __forceinline__ void merge_warps(const Held<Shape>& held, const float (&none)[kCount],
                                              const Make& make, const Add& add, float* parts) {
    constexpr int kFit = kStaged / kCount;
    constexpr int kSome = kFit < Shape::kColumns ? kFit : Shape::kColumns;
    const int thread = threadIdx.x;
    if constexpr (kFirst > 0) __syncthreads();  // all have read what is overwritten
    held.template each<kFirst / 128, (kFirst + kSome) / 128>(
        [&](int g, const Four32(&rows)[Shape::kOwn]) {
          float own[kCount][4];
          make(g, rows, own);
#pragma unroll
          for (int a = 0; a < kCount; ++a) {
            store_four(&memory_.stage[thread / 32][a * kSome + at_.column(g) - kFirst], own[a]);
          }
        });
    __syncthreads();
    for (int column = thread; column < kSome; column += Shape::kThreads) {
      float all[kCount], value[kCount];
#pragma unroll
      for (int a = 0; a < kCount; ++a) all[a] = none[a];
#pragma unroll 8
      for (int warp = 0; warp < Shape::kWarps; ++warp) {
#pragma unroll
        for (int a = 0; a < kCount; ++a) value[a] = memory_.stage[warp][a * kSome + column];
        add(all, value);
      }
#pragma unroll
      for (int a = 0; a < kCount; ++a) *place(parts, a, at_.rank, kFirst + column) = all[a];
    }
    if constexpr (kFirst + kSome < Shape::kColumns) {
      merge_warps<kFirst + kSome>(held, none, make, add, parts);
    }
  }

  // Behind it is what all threads of the crew have written before it.
  __device__ __forceinline__ void wait_for_crew() {
    ++turn_;
    __syncthreads();
    if (threadIdx.x == 0) {
      const unsigned all = static_cast<unsigned>(turn_ * Shape::kCtas);
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals_) : "memory");
      unsigned seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(seen)
                     : "l"(arrivals_)
                     : "memory");
      } while (seen < all);
    }
    __syncthreads();
  }

  const CrewPlace<Shape>& at_;
  Memory& memory_;
  float* parts_;
  unsigned* arrivals_;
  int turn_ = 0;
};

}  // namespace sinkhorn::cuda::balance
