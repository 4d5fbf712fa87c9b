// By the CUDA runtime and c10's allocator: at::cuda::CUDAGraph would need Torch's CUDA library,
// which this one does not link.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <atomic>

#include "ops/graph.h"

namespace sinkhorn::ops {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// Pools go by numbers; Torch counts its own from 1, so that these are never among them.
c10::MempoolId_t new_pool() {
  static std::atomic<c10::CaptureId_t> next{c10::CaptureId_t{1} << 62};
  return {0, next++};
}

// Allocations on a stream come from a pool of its own while one lives.
class PoolScope {
 public:
  PoolScope(c10::cuda::CUDAStream stream, c10::MempoolId_t pool)
      : device_(stream.device_index()), pool_(pool) {
    allocator::beginAllocateToPool(device_, pool_,
                                   [raw = stream.stream()](cudaStream_t s) { return s == raw; });
  }
  ~PoolScope() { allocator::endAllocateToPool(device_, pool_); }
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;

 private:
  c10::DeviceIndex device_;
  c10::MempoolId_t pool_;
};

class CudaGraph : public Graph {
 public:
  CudaGraph(const std::function<void()>& f, c10::cuda::CUDAStream stream, c10::MempoolId_t pool)
      : device_(stream.device_index()), pool_(pool) {
    const PoolScope scope(stream, pool_);  // takes the pool up for this graph
    try {
      record(f, stream);
    } catch (...) {
      allocator::releasePool(device_, pool_);
      throw;
    }
  }
  ~CudaGraph() override {
    C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(executable_));
    allocator::releasePool(device_, pool_);
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void replay() override {
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaGraphLaunch(executable_, c10::cuda::getCurrentCUDAStream(device_)));
  }

 private:
  void record(const std::function<void()>& f, c10::cuda::CUDAStream stream) {
    // Other threads may go on allocating memory meanwhile.
    C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      f();
    } catch (...) {
      (void)cudaStreamEndCapture(stream, &graph);  // what f threw is the cause
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      (void)cudaGetLastError();
      throw;
    }
    C10_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
    (void)cudaGraphDestroy(graph);
    C10_CUDA_CHECK(made);
  }

  c10::DeviceIndex device_;
  c10::MempoolId_t pool_;
  cudaGraphExec_t executable_ = nullptr;
};

// One stream behind what another has been given so far.
void wait_for(c10::cuda::CUDAStream waiting, c10::cuda::CUDAStream other) {
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(event, other));
  C10_CUDA_CHECK(cudaStreamWaitEvent(waiting, event, 0));
  C10_CUDA_CHECK(cudaEventDestroy(event));  // it goes when nobody waits for it any more
}

class CudaCaptureStream : public CaptureStream {
 public:
  explicit CudaCaptureStream(c10::Device device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {
    // A pool that no graph holds any more could not be taken up again.
    allocator::createOrIncrefPool(stream_.device_index(), pool_);
  }
  ~CudaCaptureStream() override { allocator::releasePool(stream_.device_index(), pool_); }
  CudaCaptureStream(const CudaCaptureStream&) = delete;
  CudaCaptureStream& operator=(const CudaCaptureStream&) = delete;

  void run(const std::function<void()>& f) override {
    const c10::cuda::CUDAStream outside = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    const c10::cuda::CUDAStreamGuard guard(stream_);
    wait_for(stream_, outside);
    try {
      f();
    } catch (...) {  // what was given to the stream runs on
      wait_for(outside, stream_);
      throw;
    }
    wait_for(outside, stream_);
  }
  std::unique_ptr<Graph> capture(const std::function<void()>& f) override {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    stream_.synchronize();
    return std::make_unique<CudaGraph>(f, stream_, pool_);
  }

 private:
  c10::cuda::CUDAStream stream_;
  // One for all graphs: they run one after another.
  c10::MempoolId_t pool_ = new_pool();
};

}  // namespace

std::unique_ptr<CaptureStream> make_capture_stream(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  return std::make_unique<CudaCaptureStream>(device);
}

}  // namespace sinkhorn::ops
