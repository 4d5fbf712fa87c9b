// All that a checkpoint holds: parameters, optimizer, random numbers, place in the data, step.
#pragma once

#include <filesystem>
#include <string>

#include "sinkhorn/models/models.h"
#include "sinkhorn/models/safetensors.h"
#include "train/step.h"

namespace sinkhorn::train {

struct Place {
  int64_t step = 0;
  std::string data;  // position of the training source
  double best = 0;   // best score so far
  bool has_best = false;
  int64_t evaluated = 0;  // the last step with an evaluation behind it
};

// The state of the random numbers.
struct Chance {
  at::Tensor cpu;
  at::Tensor device;  // undefined on the CPU
};
Chance get_chance(at::Device device);
void set_chance(const Chance& chance, at::Device device);

models::NamedTensors state_tensors(Stepper& stepper, at::Device device);
models::Metadata state_metadata(const Place& place, const std::string& config_text,
                                const models::ModelConfig& model);

// Copies a checkpoint's tensors into the live ones; throws Error, naming the file and the tensor,
// where they do not fit.
Place restore(const std::filesystem::path& path, Stepper& stepper, at::Device device);

// Copies the parameters alone, of a checkpoint or of an exported file.
void begin_with(const std::filesystem::path& path, Stepper& stepper);

// The configuration that a checkpoint was made with, as text.
std::string checkpoint_config(const std::filesystem::path& path);

// The longest sequence a checkpoint's model was made for: sort networks have a column a block.
int64_t checkpoint_max_length(const std::filesystem::path& path);

// Parameters alone, for use: of a checkpoint or of an exported file. On the CPU they are the mapped
// file itself wherever it has their type: nothing is read before it is used, and nothing is copied
// but what is written to. Half types are kept as they are; the others become `wide` (float32 or
// float64). Returns the step.
int64_t load_parameters(const std::filesystem::path& path, models::Model& model, at::Device device,
                        at::ScalarType wide);

}  // namespace sinkhorn::train
