// Counts the calls by which a program waits for a GPU, and its copies between host and device by
// whether the host's memory is pageable (such a copy waits as well) or pinned, for
// test_train_cuda.py. Loaded before the program (LD_PRELOAD), it stands before the CUDA runtime's
// functions of the same names, hands each call on, and writes the three counts into the file that
// WAIT_COUNTS names when the program ends.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace {

std::atomic<long> waits{0}, pageable{0}, pinned{0};

template <class... Arguments>
int hand_on(const char* name, Arguments... arguments) {
  using Function = int (*)(Arguments...);
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name))(arguments...);
}

template <class... Arguments>
int waiting(const char* name, Arguments... arguments) {
  ++waits;
  return hand_on(name, arguments...);
}

// cudaMemoryType of what a pointer points to: 0 is memory that CUDA does not know.
int memory_type(const void* pointer) {
  struct {
    int type = 0, device = 0;
    void* pointers[2] = {};
    long reserved[16] = {};
  } attributes;
  return hand_on("cudaPointerGetAttributes", static_cast<void*>(&attributes), pointer) == 0
             ? attributes.type
             : 0;
}

struct AtEnd {
  ~AtEnd() {
    const char* path = std::getenv("WAIT_COUNTS");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "w");
    if (file == nullptr) return;
    std::fprintf(file, "%ld %ld %ld\n", waits.load(), pageable.load(), pinned.load());
    std::fclose(file);
  }
} at_end;

}  // namespace

extern "C" {
int cudaDeviceSynchronize() { return waiting("cudaDeviceSynchronize"); }
int cudaStreamSynchronize(void* stream) { return waiting("cudaStreamSynchronize", stream); }
int cudaEventSynchronize(void* event) { return waiting("cudaEventSynchronize", event); }
int cudaMemcpy(void* to, const void* from, std::size_t bytes, int kind) {
  return waiting("cudaMemcpy", to, from, bytes, kind);
}
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
  constexpr int to_device = 1, to_host = 2, host = 1;
  if (kind == to_device || kind == to_host) {
    ++(memory_type(kind == to_device ? from : to) == host ? pinned : pageable);
  }
  return hand_on("cudaMemcpyAsync", to, from, bytes, kind, stream);
}
}
