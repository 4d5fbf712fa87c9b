// Kernels on many tensors at once: a launch carries a table of them in its arguments, where a
// captured graph keeps it, and every block takes one piece of one of them.
//
// Tensor i of a table is cut into pieces of so many elements, at least one, that blocks first[i],
// first[i] + 1, ... take. A block finds its tensor by counting those that begin at or before it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace sinkhorn::cuda {

// Item has a member `size`. kMost: at most the threads of a block, and all of it with what else a
// kernel is told at most the 4 KiB that arguments may take everywhere.
template <class Item, int kMost>
struct Table {
  int count = 0, blocks = 0;
  int first[kMost] = {};
  Item items[kMost] = {};
};

inline int pieces_of(int64_t size, int64_t piece) {
  return static_cast<int>(std::max<int64_t>(1, (size + piece - 1) / piece));
}

// Calls launch(table, number of the table's first item) until all items had their turn.
template <int kMost, class Item, class Launch>
void by_tables(const Item* items, int count, int64_t piece, const Launch& launch) {
  for (int begin = 0; begin < count; begin += kMost) {
    Table<Item, kMost> table;
    table.count = std::min(kMost, count - begin);
    for (int i = 0; i < table.count; ++i) {
      table.items[i] = items[begin + i];
      table.first[i] = table.blocks;
      table.blocks += pieces_of(table.items[i].size, piece);
    }
    launch(table, begin);
  }
}

struct Piece {
  int item;
  int64_t begin;  // a multiple of the pieces' size
  int size;
};

// Every thread of the block takes part.
template <class Item, int kMost>
__device__ __forceinline__ Piece piece_of_block(const Table<Item, kMost>& table, int piece) {
  const int t = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  const int item = __syncthreads_count(t < table.count && table.first[t] <= block) - 1;
  const int64_t begin = int64_t{block - table.first[item]} * piece;
  const int64_t left = table.items[item].size - begin;
  return {item, begin, static_cast<int>(left < piece ? left : piece)};
}

// Says that this block has come so far: how many blocks of the launch have said so before.
// `arrived` is 0 before the launch and after. By one thread of the block.
__device__ __forceinline__ unsigned arrive(unsigned* arrived) {
  __threadfence();
  return atomicInc(arrived, gridDim.x - 1);
}

// Whether this block of the launch ends last: then it sees what every other wrote before, and
// nobody reads any more. Every thread of the block takes part.
__device__ __forceinline__ bool is_last_block(unsigned* arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = arrive(arrived) == gridDim.x - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

}  // namespace sinkhorn::cuda
