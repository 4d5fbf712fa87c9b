#include "sinkhorn/models/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>

#include "scratch.h"
#include "sinkhorn/error.h"

namespace sinkhorn::models {
namespace {

using test::count_files;
using test::read_bytes;
using test::Scratch;
using test::write_bytes;

std::string file_of(const std::string& header, size_t data_size) {
  const uint64_t length = header.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + std::string(data_size, '\1');
}

// The message of the Error that loading these bytes throws; "" where it loads.
std::string refusal(const std::string& bytes) {
  const Scratch scratch;
  write_bytes(scratch / "bad.safetensors", bytes);
  try {
    load_safetensors(scratch / "bad.safetensors");
    return "";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_NE(message.find("bad.safetensors: "), std::string::npos) << message;
    return message;
  }
}

std::string refusal(const std::string& header, size_t data_size) {
  return refusal(file_of(header, data_size));
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
}

TEST(SafeTensors, EveryTypeShapeAndStrideComesBack) {
  const Scratch scratch;
  at::manual_seed(1);
  NamedTensors tensors;
  for (const at::ScalarType type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt,
                                    at::kLong, at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    const std::string name = at::toString(type);
    const at::Tensor values = at::randint(0, 100, {3, 5}, at::kInt).to(type);
    tensors.emplace_back(name, values);
    tensors.emplace_back(name + ".transposed", values.t());
    tensors.emplace_back(name + ".strided", values.slice(1, 0, 5, 2));
    tensors.emplace_back(name + ".scalar", values[1][2]);
    tensors.emplace_back(name + ".empty", at::empty({0, 7}, type));
  }
  const Metadata metadata = {{"step", "12"}, {"quote", "\"\\\n\u00e9"}};
  save_safetensors(scratch / "all.safetensors", tensors, metadata);
  const SafeTensors loaded = load_safetensors(scratch / "all.safetensors");
  EXPECT_EQ(loaded.metadata, metadata);
  ASSERT_EQ(loaded.tensors.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& back = loaded.tensors.at(name);
    EXPECT_EQ(back.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(back, tensor)) << name;
  }
  EXPECT_EQ(count_files(scratch.path()), 1u);
}

TEST(SafeTensors, HeaderIsPaddedAndTensorsAligned) {
  const Scratch scratch;
  save_safetensors(scratch / "a.safetensors",
                   {{"odd", at::ones({3}, at::kByte)}, {"wide", at::ones({2}, at::kDouble)}});
  uint64_t length = 0;
  std::memcpy(&length, read_bytes(scratch / "a.safetensors").data(), sizeof length);
  EXPECT_EQ((8 + length) % 64, 0u);
  const SafeTensors loaded = load_safetensors(scratch / "a.safetensors");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(loaded.tensors.at("wide").data_ptr()) % 8, 0u);
}

TEST(SafeTensors, TensorsOutliveTheFileAndWritesStayInMemory) {
  const Scratch scratch;
  const auto path = scratch / "a.safetensors";
  save_safetensors(path, {{"x", at::arange(1000, at::kFloat)}});
  at::Tensor x = load_safetensors(path).tensors.at("x");
  x.add_(1);
  EXPECT_TRUE(at::equal(load_safetensors(path).tensors.at("x"), at::arange(1000, at::kFloat)));
  std::filesystem::remove(path);
  EXPECT_TRUE(at::equal(x, at::arange(1, 1001, at::kFloat)));
}

TEST(SafeTensors, UnalignedDataIsCopied) {
  const Scratch scratch;
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"I32","shape":[2],"data_offsets":[1,9]}})";
  write_bytes(scratch / "u.safetensors", file_of(header, 9));
  const SafeTensors loaded = load_safetensors(scratch / "u.safetensors");
  EXPECT_TRUE(at::equal(loaded.tensors.at("b"), at::full({2}, 0x01010101, at::kInt)));
}

TEST(SafeTensors, NoTensorsAtAll) {
  const Scratch scratch;
  save_safetensors(scratch / "none.safetensors", {});
  EXPECT_TRUE(load_safetensors(scratch / "none.safetensors").tensors.empty());
}

TEST(SafeTensors, RefusesWhatItCannotSave) {
  const Scratch scratch;
  const auto path = scratch / "x.safetensors";
  const at::Tensor x = at::ones({2});
  EXPECT_THROW(save_safetensors(path, {{"x", x}, {"x", x}}), Error);
  EXPECT_THROW(save_safetensors(path, {{"__metadata__", x}}), Error);
  EXPECT_THROW(save_safetensors(path, {{"x", at::Tensor()}}), Error);
  EXPECT_THROW(save_safetensors(path, {{"x", x.to(at::kComplexFloat)}}), Error);
  EXPECT_THROW(save_safetensors(path, {{"\xff", x}}), Error);
  EXPECT_THROW(save_safetensors(scratch / "missing/x.safetensors", {{"x", x}}), Error);
  EXPECT_EQ(count_files(scratch.path()), 0u);
}

TEST(SafeTensors, NamesWhatIsWrong) {
  expect_contains(refusal(""), "0 bytes");
  expect_contains(refusal("1234567"), "7 bytes");
  expect_contains(refusal(std::string(100, '\xff')), "header of 18446744073709551615 bytes");
  expect_contains(refusal(file_of("{}", 0).substr(0, 9)), "truncated");
  expect_contains(refusal("[1]", 0), "not a JSON object");
  expect_contains(refusal("{\"a\":", 0), "not a JSON object");
  expect_contains(refusal(std::string(1000, '['), 0), "nested");
  expect_contains(refusal(R"({"__metadata__":{"a":1}})", 0), "__metadata__ 'a'");
  expect_contains(refusal(R"({"a":3})", 0), "tensor 'a'");
  const auto one = [](const std::string& type, const std::string& shape, const std::string& range) {
    return R"("a":{"dtype":)" + type + R"(,"shape":)" + shape + R"(,"data_offsets":)" + range + "}";
  };
  const std::string good = one("\"F32\"", "[2]", "[0,8]");
  EXPECT_EQ(refusal("{" + good + "}", 8), "");
  expect_contains(refusal("{" + good + "," + good + "}", 8), "twice");
  expect_contains(refusal("{" + good + "}", 9), "9 bytes of data");
  expect_contains(refusal("{" + good + "}", 7), "data_offsets");
  expect_contains(refusal("{" + one("\"F31\"", "[2]", "[0,8]") + "}", 8), "dtype 'F31'");
  expect_contains(refusal("{" + one("1", "[2]", "[0,8]") + "}", 8), "no dtype");
  expect_contains(refusal("{" + one("\"F32\"", "[3]", "[0,8]") + "}", 8), "need 12");
  expect_contains(refusal("{" + one("\"F32\"", "[-2]", "[0,8]") + "}", 8), "shape");
  expect_contains(refusal("{" + one("\"F32\"", "[2.0]", "[0,8]") + "}", 8), "shape");
  expect_contains(refusal("{" + one("\"F32\"", "[2]", "[8,0]") + "}", 8), "data_offsets");
  expect_contains(refusal("{" + one("\"F32\"", "[2]", "[0,8,8]") + "}", 8), "data_offsets");
  expect_contains(refusal("{" + one("\"F32\"", "[4611686018427387904,4,2]", "[0,8]") + "}", 8),
                  "too large");
  expect_contains(refusal("{" + one("\"F32\"", "[0,9223372036854775807,9]", "[0,0]") + "}", 0),
                  "too large");
  const std::string other = R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":)";
  expect_contains(refusal("{" + good + other + "[4,8]}}", 8), "overlap");
  expect_contains(refusal("{" + good + other + "[10,14]}}", 14), "gap");
}

TEST(SafeTensors, WhatAMessageQuotesIsShortAndOnOneLine) {
  const std::string long_name(10000, 'x');
  EXPECT_LT(refusal("{\"" + long_name + "\":3}", 0).size(), 300u);
  expect_contains(refusal(R"({"a\nb":3})", 0), "tensor 'a?b'");
  expect_contains(refusal(R"({"__metadata__":{"a\nb":3}})", 0), "'a?b'");
}

TEST(SafeTensors, MissingFileAndFolderAreNamed) {
  const Scratch scratch;
  ASSERT_EQ(::mkfifo((scratch / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(load_safetensors(scratch / "pipe"), Error);
  EXPECT_THROW(load_safetensors(scratch / "missing.safetensors"), Error);
  EXPECT_THROW(load_safetensors(scratch.path()), Error);
}

TEST(SafeTensors, EveryTruncationIsRefused) {
  const Scratch scratch;
  save_safetensors(scratch / "a.safetensors",
                   {{"x", at::ones({5})}, {"y", at::ones({3}, at::kByte)}}, {{"k", "v"}});
  const std::string bytes = read_bytes(scratch / "a.safetensors");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(refusal(bytes.substr(0, size)), "") << size;
  }
}

// A disk that fills up: the limit on a file's size fails writes halfway in the same manner.
TEST(SafeTensors, AFailedWriteKeepsTheOldFile) {
  const Scratch scratch;
  const auto path = scratch / "a.safetensors";
  save_safetensors(path, {{"x", at::ones({10})}});
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit = before;
  limit.rlim_cur = 4096;
  setrlimit(RLIMIT_FSIZE, &limit);
  std::string message;
  try {
    save_safetensors(path, {{"x", at::zeros({100000})}});
  } catch (const Error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  expect_contains(message, "a.safetensors");
  expect_contains(message, "cannot write");
  EXPECT_EQ(count_files(scratch.path()), 1u);
  EXPECT_TRUE(at::equal(load_safetensors(path).tensors.at("x"), at::ones({10})));
}

}  // namespace
}  // namespace sinkhorn::models
