// write_files DIR: a run folder, resumed once, for tests/python/test_files.py to read back.
#include <ATen/ATen.h>

#include <cmath>

#include "train/run_folder.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::filesystem::path root = argv[1];
  const auto values = at::arange(24, at::kInt).reshape({4, 6});
  sinkhorn::models::NamedTensors tensors;
  for (const at::ScalarType type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt,
                                    at::kLong, at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    tensors.emplace_back(std::string("t.") + at::toString(type), values.to(type).t());
  }
  tensors.emplace_back("scalar", at::full({}, 3.5));
  tensors.emplace_back("empty", at::empty({0, 3}));
  {
    sinkhorn::train::RunFolder run(root, /*resume=*/false);
    run.write_text("config.ini", "[train]\nsteps = 30\n");
    for (int step = 10; step <= 30; step += 10) run.log("train", step, {{"loss", 1.0 / step}});
    run.save(20, tensors, {{"step", "20"}, {"note", "\u00e9\""}}, /*keep=*/2, /*best=*/true);
  }
  sinkhorn::train::RunFolder run(root, /*resume=*/true);
  run.rewind_log(20, 20);
  run.log("train", 30, {{"loss", 7.0}, {"rate", 0.25}});
  run.log("eval", 30, {{"perplexity", std::nan("")}});
  run.flush();
  return 0;
}
