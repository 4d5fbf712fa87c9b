// What bulk tensor stores write, told to tools that watch memory: compute-sanitizer's
// initcheck does not see such stores (tests/kernels/bulk_store_probe.cu) and would take all that is
// read of them for memory that nobody wrote. Where no tool listens this does nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <initializer_list>

#if __has_include(<nvtx3/nvToolsExtMemCudaRt.h>)
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtMem.h>
#include <nvtx3/nvToolsExtMemCudaRt.h>
#define SINKHORN_TELLS_TOOLS 1
#else
#define SINKHORN_TELLS_TOOLS 0
#endif

namespace sinkhorn::cuda {

struct Written {
  const void* data;
  size_t bytes;
};

// By work that is given to the stream next.
inline void tell_written(std::initializer_list<Written> all, cudaStream_t stream) {
#if SINKHORN_TELLS_TOOLS
  for (const Written& one : all) {
    if (one.bytes == 0) continue;
    const nvtxMemVirtualRangeDesc_t range{one.bytes, one.data};
    nvtxMemMarkInitializedBatch_t batch{};
    batch.extCompatID = NVTX_EXT_COMPATID_MEM;
    batch.structSize = sizeof batch;
    batch.regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    batch.regionDescCount = 1;
    batch.regionDescElementSize = sizeof range;
    batch.regionDescElements = &range;
    nvtxMemCudaMarkInitialized(nullptr, stream, 0, &batch);
  }
#else
  (void)all, (void)stream;
#endif
}

}  // namespace sinkhorn::cuda
