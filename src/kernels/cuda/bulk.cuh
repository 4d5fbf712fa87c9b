// Tiles of tokens into shared memory by Hopper's bulk copies (sm_90a): one thread asks for rows, 64
// as a rule, of 64 or 32 numbers, and the hardware fetches them, lays them out as products want
// them (hopper.cuh), puts zeros outside of the tensor, and counts the bytes in a barrier.
//
// Copies by all threads (load_rows) cost each thread its addresses, and what they wrote has to be
// published to the tensor cores with a fence that also waits for the copies still under way. This
// way neither is needed, as long as no thread reads or writes the memory itself.
#pragma once

#include <cuda.h>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tile.cuh"

namespace sinkhorn::cuda {

// The driver's function that describes a tensor to the hardware, or null.
inline auto tensor_describer() {
  static const auto found = [] {
    constexpr const char* kName = "cuTensorMapEncodeTiled";
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &result),
          kName);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

// Describes [batch, heads, positions, width] of a half type to the hardware, and that it is fetched
// by so many columns of so many rows.
inline CUresult try_describe(CUtensorMap& map, const AttentionCall& call, const Tokens& x,
                             int positions, int columns, int rows = 64) {
  const auto bytes = [&](int size, int64_t stride) {  // that of a dimension of size 1 is arbitrary
    return static_cast<cuuint64_t>(size == 1 ? call.width : stride) * 2;
  };
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(call.width), static_cast<cuuint64_t>(positions),
      static_cast<cuuint64_t>(call.heads), static_cast<cuuint64_t>(call.batch)};
  const cuuint64_t strides[3] = {bytes(positions, x.token), bytes(call.heads, x.head),
                                 bytes(call.batch, x.batch)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto swizzle = columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const auto type = call.type == Type::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_describer()(&map, type, 4, x.data, sizes, strides, box, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Whether describe() can: not where rows, heads or sequences lie on top of one another.
inline bool can_describe(const AttentionCall& call, const Tokens& x, int positions) {
  constexpr int64_t kMost = int64_t{1} << 39;  // numbers from one to the next
  const auto fine = [](int size, int64_t stride) {
    return size == 1 || (stride > 0 && stride < kMost);
  };
  if (!fine(positions, x.token) || !fine(call.heads, x.head) || !fine(call.batch, x.batch)) {
    return false;
  }
  // The driver wants the card's context to be this thread's. Threads that run backward begin
  // without one, until something is launched or the card is set.
  static thread_local bool works = false;
  if (!works && tensor_describer() != nullptr) {
    int device = 0;
    check(cudaGetDevice(&device), "attention");
    check(cudaSetDevice(device), "attention");
    CUtensorMap map;
    works = try_describe(map, call, x, positions, 32) == CUDA_SUCCESS;
  }
  return works;
}

// Of what can be.
inline CUtensorMap describe(const AttentionCall& call, const Tokens& x, int positions, int columns,
                            int rows = 64) {
  CUtensorMap map;
  const CUresult result = try_describe(map, call, x, positions, columns, rows);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("attention: the driver cannot describe a tensor (error " +
                             std::to_string(static_cast<int>(result)) + ")");
  }
  return map;
}

// Where the tiles of a call come from: sorted blocks where there is a sort, dO in backward.
struct TokenMaps {
  CUtensorMap query, key, value, sorted_key, sorted_value, grad;
};

// Whether all of them can be described.
inline bool can_describe(const AttentionCall& call) {
  return can_describe(call, call.query, call.length) && can_describe(call, call.key, call.length) &&
         can_describe(call, call.value, call.length) &&
         (call.grad_out.data == nullptr || can_describe(call, call.grad_out, call.length));
}

// columns: those of a panel.
inline TokenMaps describe(const AttentionCall& call, int columns) {
  TokenMaps maps{};
  maps.query = describe(call, call.query, call.length, columns);
  maps.key = describe(call, call.key, call.length, columns);
  maps.value = describe(call, call.value, call.length, columns);
  if (call.rows > 0) {
    const int positions = call.rows * call.block;
    const int64_t head = int64_t{positions} * call.width;
    const auto of = [&](void* data) {
      return describe(call, {data, head * call.heads, head, call.width}, positions, columns);
    };
    maps.sorted_key = of(call.sorted_key);
    maps.sorted_value = of(call.sorted_value);
  }
  if (call.grad_out.data != nullptr) {
    maps.grad = describe(call, call.grad_out, call.length, columns);
  }
  return maps;
}

// A barrier in shared memory that so many arrivals complete, again and again: one, if it is for one
// thread's copies. The thread that readies it publishes it (publish_writes) before the others are
// let on.
__device__ __forceinline__ void ready_barrier(uint64_t* barrier, int arrivals = 1) {
#if SINKHORN_HOPPER
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}
// By that thread, before it asks for so many bytes.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
#if SINKHORN_HOPPER
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}
// Waits until they have come; parity: whether that was an odd number of times before.
__device__ __forceinline__ void await_bytes(uint64_t* barrier, int parity) {
#if SINKHORN_HOPPER
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
#endif
}
// Asks for as many rows of as many numbers as the map says, from `column` of position `first` on,
// which may lie outside.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, uint64_t* barrier,
                                         int column, int first, int head, int batch) {
#if SINKHORN_HOPPER
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(first), "r"(head), "r"(batch)
      : "memory");
#endif
}

}  // namespace sinkhorn::cuda
