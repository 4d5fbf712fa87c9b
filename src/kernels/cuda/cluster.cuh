// CTAs of a cluster on Hopper (sm_90a): barriers in each other's shared memory, and copies from one
// shared memory to another's.
//
// Addresses with a rank are those of the same object in the shared memory of another CTA, as
// 32-bit numbers. A copy ends with its bytes counted in a barrier of the CTA that it goes to; who
// sent it learns of that only if told.
#pragma once

#include "kernels/cuda/bulk.cuh"

namespace sinkhorn::cuda {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if SINKHORN_HOPPER
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ uint32_t address_at(const void* shared, uint32_t rank) {
  uint32_t address = 0;
#if SINKHORN_HOPPER
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(shared)), "r"(rank));
#endif
  return address;
}

// All threads of all CTAs; what they wrote before is seen after.
__device__ __forceinline__ void sync_cluster() {
#if SINKHORN_HOPPER
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
#if SINKHORN_HOPPER
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
// Says nothing of what was written: for barriers behind which memory is only used again, or whose
// data comes by copies. With the cluster's scope it would wait for all that was stored before, and
// who waits would lose what the first-level cache holds.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
#if SINKHORN_HOPPER
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Whether a barrier has been completed, as await_bytes without waiting.
__device__ __forceinline__ bool has_come(uint64_t* barrier, int parity) {
  uint32_t done = 1;
#if SINKHORN_HOPPER
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

// `to` and `barrier` lie in the shared memory of one CTA of the cluster.
__device__ __forceinline__ void copy_to_cluster(uint32_t to, const void* from, int bytes,
                                                uint32_t barrier) {
#if SINKHORN_HOPPER
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(shared_address(from)), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// The reverse of copy_box, and until such copies of this thread have read what they store.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* from, int column,
                                          int first, int head, int batch) {
#if SINKHORN_HOPPER
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(column), "r"(first), "r"(head), "r"(batch)
      : "memory");
#endif
}
__device__ __forceinline__ void commit_stores() {
#if SINKHORN_HOPPER
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_stores_read() {
#if SINKHORN_HOPPER
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// Until they are in memory, where others may then read them.
__device__ __forceinline__ void await_stores() {
#if SINKHORN_HOPPER
  asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
#endif
}

}  // namespace sinkhorn::cuda
