// What compute-sanitizer's initcheck knows: three kernels write 2 KiB each, by a bulk tensor store
// (cp.async.bulk.tensor), by a bulk store and by plain stores, and three others read them. All of
// it is written, so that whatever initcheck reports here is the tool's own. A program of its own,
// for tools/gpu_check: for sm_90a, without the project's headers.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace {

constexpr int kRows = 16, kColumns = 64, kNumbers = kRows * kColumns, kBytes = 2 * kNumbers;
constexpr int kReaders = 32;

__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ void fill(uint16_t* tile) {
  for (int i = threadIdx.x; i < kNumbers; i += blockDim.x) tile[i] = static_cast<uint16_t>(i);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
}
__device__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void write_by_tensor(const __grid_constant__ CUtensorMap map) {
  __shared__ __align__(1024) uint16_t tile[kNumbers];
  fill(tile);
  if (threadIdx.x != 0) return;
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
          &map),
      "r"(shared_address(tile)), "r"(0), "r"(0)
      : "memory");
  wait_for_stores();
}
__global__ void write_by_bulk(uint16_t* to) {
  __shared__ __align__(1024) uint16_t tile[kNumbers];
  fill(tile);
  if (threadIdx.x != 0) return;
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(tile)), "r"(kBytes)
               : "memory");
  wait_for_stores();
}
__global__ void write_plainly(uint16_t* to) {
  for (int i = threadIdx.x; i < kNumbers; i += blockDim.x) to[i] = static_cast<uint16_t>(i);
}

__global__ void read_after_tensor(const uint16_t* x, unsigned* sum) {
  atomicAdd(sum, x[threadIdx.x]);
}
__global__ void read_after_bulk(const uint16_t* x, unsigned* sum) {
  atomicAdd(sum, x[threadIdx.x]);
}
__global__ void read_after_plain(const uint16_t* x, unsigned* sum) {
  atomicAdd(sum, x[threadIdx.x]);
}

// Whether the tensor could be described.
bool describe(CUtensorMap& map, void* data) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &result) != cudaSuccess) {
    return false;
  }
  const cuuint64_t sizes[2] = {kColumns, kRows}, strides[1] = {2 * kColumns};
  const cuuint32_t box[2] = {kColumns, kRows}, steps[2] = {1, 1};
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
             &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

int main() {
  uint16_t* written[3] = {};
  unsigned* sum = nullptr;
  for (uint16_t*& memory : written) cudaMalloc(&memory, kBytes);
  cudaMalloc(&sum, sizeof *sum);
  cudaMemset(sum, 0, sizeof *sum);
  CUtensorMap map;
  if (!describe(map, written[0])) {
    std::printf("no card here that stores tensors in bulk\n");
    return 77;
  }
  write_by_tensor<<<1, 128>>>(map);
  write_by_bulk<<<1, 128>>>(written[1]);
  write_plainly<<<1, 128>>>(written[2]);
  read_after_tensor<<<1, kReaders>>>(written[0], sum);
  read_after_bulk<<<1, kReaders>>>(written[1], sum);
  read_after_plain<<<1, kReaders>>>(written[2], sum);
  unsigned found = 0;
  const cudaError_t error = cudaMemcpy(&found, sum, sizeof found, cudaMemcpyDeviceToHost);
  const unsigned expected = 3 * kReaders * (kReaders - 1) / 2;
  std::printf("%s, sum %u of %u\n", cudaGetErrorString(error), found, expected);
  return error == cudaSuccess && found == expected ? 0 : 1;
}
