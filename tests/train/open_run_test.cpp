// A run or an export in use: its parameters are the file itself, and still may be trained.
#include "train/open_run.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "scratch.h"
#include "sinkhorn/error.h"
#include "small_run.h"
#include "train/inputs.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;
using test::exported;
using test::trained;

// Whether the address lies in a mapping of the file.
bool is_mapped(const void* address, const fs::path& file) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    if (begin <= wanted && wanted < end) return line.ends_with(file.string());
  }
  return false;
}

void expect_mapped(const OpenRun& run) {
  for (const auto& item : run.model->named_parameters()) {
    EXPECT_TRUE(is_mapped(item.value().data_ptr(), run.checkpoint)) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
  }
}

// A step of plain descent; the loss before it.
double descend(OpenRun& run) {
  tasks::Batch batch;
  tasks::BatchConfig rows;
  rows.rows = 8;
  run.task->eval("valid", rows)->next(batch);
  const at::Tensor loss = run.model->loss(make_input(batch, false), run.context);
  loss.backward();
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : run.model->parameters()) {
    parameter.sub_(parameter.grad(), 0.05);
    parameter.mutable_grad() = at::Tensor();
  }
  return loss.item<double>();
}

TEST(OpenRun, ParametersAreTheFile) {
  const test::Scratch scratch;
  const RunConfig config = trained(scratch / "run");
  expect_mapped(open_run(config, "newest"));
  expect_mapped(open_run(config, "best"));
  for (const char* type : {"float32", "bf16", "fp16"}) {
    expect_mapped(open_run(exported(config, scratch / type, type), "newest"));
  }
}

TEST(OpenRun, TypesAreThoseOfTheExport) {
  const test::Scratch scratch;
  RunConfig config = exported(trained(scratch / "run"), scratch / "out", "bf16");
  const OpenRun half = open_run(config, "newest");
  EXPECT_EQ(half.context.compute, at::kBFloat16);
  for (const at::Tensor& parameter : half.model->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), parameter.dim() > 1 ? at::kBFloat16 : at::kFloat);
  }
  config.train.precision = "float64";
  for (const at::Tensor& parameter : open_run(config, "newest").model->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), at::kDouble);
  }
}

TEST(OpenRun, TrainingFromTheFileLeavesItAlone) {
  const test::Scratch scratch;
  const RunConfig config = trained(scratch / "run");
  for (const char* type : {"float32", "bf16"}) {
    OpenRun run = open_run(exported(config, scratch / type, type), "newest");
    const std::string before = test::read_bytes(run.checkpoint);
    const double first = descend(run);
    descend(run);
    EXPECT_LT(descend(run), first) << type;
    EXPECT_EQ(test::read_bytes(run.checkpoint), before) << type;
  }
}

TEST(OpenRun, DrawsNoRandomNumbersAndLeavesOtherModelsTheirs) {
  const test::Scratch scratch;
  const RunConfig config = trained(scratch / "run");
  at::manual_seed(5);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(5);
  open_run(config, "newest");
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
  EXPECT_GT(nn::Linear(8, 8, false).weight.abs().min().item<double>(), 0.0);
}

TEST(OpenRun, ACheckpointThatShrankIsRefused) {
  const test::Scratch scratch;
  const RunConfig config = exported(trained(scratch / "run"), scratch / "out", "float32");
  fs::resize_file(fs::path(config.train.run) / kExportModel, 1000);
  EXPECT_THROW(open_run(config, "newest"), Error);
}

}  // namespace
}  // namespace sinkhorn::train
