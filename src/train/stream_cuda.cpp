// Streams of a build with CUDA.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "train/device.h"

namespace sinkhorn::train {
namespace {

class CudaGraph : public Graph {
 public:
  CudaGraph(const std::function<void()>& f, at::cuda::MempoolId_t pool) {
    // Other threads (the one that reads ahead) go on allocating pinned memory meanwhile.
    graph_.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    try {
      f();
    } catch (...) {
      try {
        graph_.capture_end();
      } catch (const std::exception&) {  // what f threw is the cause
      }
      throw;
    }
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

class CudaStream : public StepStream {
 public:
  // Before the side stream's, whose work nobody waits for.
  explicit CudaStream(at::Device device)
      : guard_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {}
  bool can_capture() const override { return true; }
  std::unique_ptr<Graph> capture(const std::function<void()>& f) override {
    guard_.current_stream().synchronize();
    return std::make_unique<CudaGraph>(f, pool_);
  }

 private:
  c10::cuda::CUDAStreamGuard guard_;
  // One for all graphs: they run one after another, and what outlives a step lies outside.
  at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
};

}  // namespace

std::unique_ptr<StepStream> make_step_stream(at::Device device) {
  if (device.is_cuda()) return std::make_unique<CudaStream>(device);
  return make_cpu_stream();
}

bool cuda_graphs_built() { return true; }

std::vector<std::string> cuda_devices() {
  std::vector<std::string> names;
  if (!at::hasCUDA()) return names;
  for (c10::DeviceIndex i = 0; i < c10::cuda::device_count(); ++i) {
    const cudaDeviceProp* p = at::cuda::getDeviceProperties(i);
    names.push_back(std::string(p->name) + ", " + std::to_string(p->totalGlobalMem >> 30) +
                    " GiB, sm_" + std::to_string(p->major) + std::to_string(p->minor));
  }
  return names;
}

int64_t peak_memory(at::Device device) {
  if (!device.is_cuda()) return process_peak_memory();
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].peak;
}

int64_t free_memory(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t free = 0, all = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  return static_cast<int64_t>(free);
}

}  // namespace sinkhorn::train
