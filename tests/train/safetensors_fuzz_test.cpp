// Files that strangers or a failing disk made: refused with a reason, or read within their bounds.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "scratch.h"
#include "sinkhorn/error.h"
#include "sinkhorn/models/safetensors.h"
#include "support/mutated_headers.h"

namespace sinkhorn::models {
namespace {

constexpr int kRounds = 16000;

int64_t peak_memory() {  // KiB
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

// Reads every byte of every tensor; the bytes they take.
size_t read_all(const SafeTensors& file) {
  size_t bytes = 0;
  for (const auto& [name, tensor] : file.tensors) {
    tensor.to(at::kDouble).sum();
    bytes += tensor.nbytes();
  }
  return bytes;
}

TEST(SafeTensorsFuzz, MutatedHeadersAreRefusedOrReadWithinTheFile) {
  const test::Scratch scratch;
  const auto path = scratch / "fuzz.safetensors";
  test::MutatedHeaders files(7);
  const int64_t before = peak_memory();
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = files.next();
    test::write_bytes(path, bytes);
    try {
      EXPECT_LT(read_all(load_safetensors(path)), bytes.size()) << round;
    } catch (const Error& error) {
      ++refused;
      const std::string message = error.what();
      ASSERT_TRUE(message.starts_with(path.string() + ": ")) << round << " " << message;
      ASSERT_EQ(message.find('\n'), std::string::npos) << round << " " << message;
      ASSERT_LT(message.size(), 600u) << round;
    }
  }
  EXPECT_GT(refused, kRounds * 8 / 10);
  EXPECT_LT(refused, kRounds);  // some mutations leave a sound file
  EXPECT_LT(peak_memory() - before, 512 << 10);
}

}  // namespace
}  // namespace sinkhorn::models
