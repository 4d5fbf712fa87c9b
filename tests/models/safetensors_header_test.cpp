// The part of loading that reads what strangers wrote, alone and without Torch: what the sanitizers
// run. Every file is an allocation of its own size, so that a read past its end is noticed.
#include "models/safetensors_header.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "sinkhorn/error.h"
#include "support/mutated_headers.h"

namespace sinkhorn::models {
namespace {

constexpr int kRounds = 40000;

void expect_within(const StoredTensors& read, size_t file_size) {
  for (const StoredTensor& tensor : read.tensors) {
    ASSERT_LE(tensor.begin, tensor.end);
    ASSERT_LE(tensor.end, file_size);
    uint64_t bytes = kStoredTypes[tensor.type].size;
    for (const int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
    ASSERT_EQ(bytes, tensor.end - tensor.begin) << tensor.name;
  }
}

TEST(SafeTensorsHeader, MutatedHeadersAreRefusedOrLieWithinTheFile) {
  test::MutatedHeaders files(11);
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string bytes = files.next();
    const auto exact = std::make_unique<char[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), exact.get());
    try {
      expect_within(read_safetensors_header({exact.get(), bytes.size()}, "some/file"),
                    bytes.size());
    } catch (const Error& error) {
      ++refused;
      const std::string message = error.what();
      ASSERT_TRUE(message.starts_with("some/file: ")) << round << " " << message;
      ASSERT_EQ(message.find('\n'), std::string::npos) << round << " " << message;
    }
  }
  EXPECT_GT(refused, kRounds * 8 / 10);
  EXPECT_LT(refused, kRounds);
}

}  // namespace
}  // namespace sinkhorn::models
