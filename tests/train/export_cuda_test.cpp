// A bf16 export opened on a GPU: its weights stay as the file has them, and what it says token by
// token is that of the file on the CPU. Without a GPU the tests are skipped.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "scratch.h"
#include "sinkhorn/generate.h"
#include "small_run.h"
#include "train/open_run.h"

namespace sinkhorn::train {
namespace {

using models::Seq2Seq;

double rms(const at::Tensor& x) { return x.square().mean().sqrt().item<double>(); }

// Logits after each of ids [B, T], in one pass.
at::Tensor full_logits(const RunConfig& config, const at::Tensor& sources, const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  const OpenRun run = open_run(config, "newest");
  auto& model = dynamic_cast<Seq2Seq&>(*run.model);
  const nn::Memory memory = model.encode(sources.to(run.device), std::nullopt, run.context);
  return model.decode(ids.to(run.device), std::nullopt, memory, run.context).cpu().to(at::kDouble);
}

// The same with a decoder.
at::Tensor cached_logits(const OpenRun& run, const at::Tensor& sources, const at::Tensor& ids) {
  generate::Decoder decoder(std::dynamic_pointer_cast<Seq2Seq>(run.model),
                            {.batch = ids.size(0), .compute = run.context.compute});
  decoder.read(sources);
  std::vector<at::Tensor> all{decoder.prefill(ids.slice(1, 0, 1)).cpu()};
  for (int64_t t = 1; t < ids.size(1); ++t) all.push_back(decoder.step(ids.select(1, t)).cpu());
  return at::stack(all, 1).to(at::kDouble);
}

class ExportOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(ExportOnCuda, Bfloat16WeightsDecode) {
  const test::Scratch scratch;
  const RunConfig half = test::exported(test::trained(scratch / "run"), scratch / "out", "bf16");
  RunConfig exact = half, on_gpu = half;
  exact.train.precision = "float64";
  on_gpu.train.device = "cuda";
  const OpenRun run = open_run(on_gpu, "newest");
  EXPECT_EQ(run.context.compute, at::kBFloat16);
  for (const at::Tensor& parameter : run.model->parameters()) {
    EXPECT_TRUE(parameter.is_cuda());
    EXPECT_EQ(parameter.scalar_type(), parameter.dim() > 1 ? at::kBFloat16 : at::kFloat);
  }
  at::manual_seed(3);
  const int64_t vocab = run.model->config().vocab;
  const at::Tensor sources = at::randint(3, vocab, {3, 12}, at::kLong);
  const at::Tensor ids =
      at::cat({at::ones({3, 1}, at::kLong), at::randint(3, vocab, {3, 11}, at::kLong)}, 1);
  const at::Tensor truth = full_logits(exact, sources, ids);
  const double allowed =
      2.0 * rms(full_logits(half, sources, ids) - truth) + 2e-3 * truth.abs().max().item<double>();
  EXPECT_LE(rms(full_logits(on_gpu, sources, ids) - truth), allowed) << "the full pass";
  EXPECT_LE(rms(cached_logits(run, sources, ids) - truth), allowed) << "token by token";
}

}  // namespace
}  // namespace sinkhorn::train
