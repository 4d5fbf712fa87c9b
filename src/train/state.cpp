#include "train/state.h"

#include <ATen/Context.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "sinkhorn/error.h"
#include "sinkhorn/models/safetensors.h"
#include "train/export_folder.h"
#include "train/notice.h"

namespace sinkhorn::train {
namespace {

constexpr char kModel[] = "model/", kOptimizer[] = "optimizer/", kReport[] = "report/";

at::Tensor random_state(at::Device device) {
  return at::globalContext().defaultGenerator(device).get_state();
}

void set_random_state(at::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  generator.set_state(state.clone());
}

const at::Tensor& find(const models::SafeTensors& file, const std::filesystem::path& path,
                       const std::string& name) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) {
    throw Error(path.string() + ": has no tensor " + name +
                "; it is of another model or optimizer than the configuration's");
  }
  return found->second;
}

// The tensor that is to take the place of `to`.
const at::Tensor& find_like(const models::SafeTensors& file, const std::filesystem::path& path,
                            const std::string& name, const at::Tensor& to) {
  const at::Tensor& from = find(file, path, name);
  if (from.sizes() != to.sizes()) {
    std::ostringstream message;
    message << path.string() << ": tensor " << name << " is " << from.sizes()
            << ", the configuration makes it " << to.sizes();
    throw Error(message.str());
  }
  return from;
}

void copy_checked(const models::SafeTensors& file, const std::filesystem::path& path,
                  const std::string& name, const at::Tensor& to) {
  to.copy_(find_like(file, path, name, to));
}

std::string metadata_value(const models::SafeTensors& file, const std::filesystem::path& path,
                           const std::string& key) {
  const auto found = file.metadata.find(key);
  if (found == file.metadata.end()) {
    throw Error(path.string() + ": has no '" + key +
                "' in its metadata; it is no checkpoint of a run");
  }
  return found->second;
}

int64_t number_of(const models::SafeTensors& file, const std::filesystem::path& path,
                  const std::string& key) {
  const auto value = nlohmann::json::parse(metadata_value(file, path, key), nullptr, false);
  if (!value.is_number_integer()) {
    throw Error(path.string() + ": '" + key + "' in its metadata is no whole number");
  }
  return value.get<int64_t>();
}

// A parameter of a checkpoint or of an exported file.
const at::Tensor& stored_parameter(const models::SafeTensors& file,
                                   const std::filesystem::path& path, const std::string& parameter,
                                   const at::Tensor& to) {
  const bool exported = metadata_value(file, path, "format") == kExportFormat;
  const std::string name = exported ? parameter : kModel + parameter;
  const at::Tensor& stored = find_like(file, path, name, to);
  if (!stored.is_floating_point()) {
    throw Error(path.string() + ": tensor " + name + " has type " +
                at::toString(stored.scalar_type()) + ", expected numbers with a fraction");
  }
  return stored;
}

// The names of a checkpoint's or an exported file's parameters that are none of these.
template <class Tensors>  // pairs of a name and a tensor
std::vector<std::string> left_over(const models::SafeTensors& file,
                                   const std::filesystem::path& path, const Tensors& parameters) {
  std::set<std::string> names;
  for (const auto& parameter : parameters) names.insert(std::get<0>(parameter));
  const bool exported = metadata_value(file, path, "format") == kExportFormat;
  const std::string prefix = exported ? "" : kModel;
  std::vector<std::string> others;
  for (const auto& [name, tensor] : file.tensors) {
    if (!name.starts_with(prefix)) continue;
    const std::string parameter = name.substr(prefix.size());
    if (!names.contains(parameter)) others.push_back(parameter);
  }
  return others;
}

template <class Tensors>
void refuse_left_over(const models::SafeTensors& file, const std::filesystem::path& path,
                      const Tensors& parameters) {
  if (const auto others = left_over(file, path, parameters); !others.empty()) {
    throw Error(path.string() + ": the configuration has no place for its tensor " + others[0] +
                "; it is of another model");
  }
}

}  // namespace

Chance get_chance(at::Device device) {
  return {random_state(at::kCPU), device.is_cuda() ? random_state(device) : at::Tensor()};
}

void set_chance(const Chance& chance, at::Device device) {
  set_random_state(at::kCPU, chance.cpu);
  if (chance.device.defined()) set_random_state(device, chance.device);
}

models::NamedTensors state_tensors(Stepper& stepper, at::Device device) {
  models::NamedTensors all;
  for (const auto& [name, tensor] : stepper.parameters()) {
    all.emplace_back(kModel + name, tensor.detach());
  }
  for (const auto& [name, tensor] : stepper.optimizer().state()) {
    all.emplace_back(kOptimizer + name, tensor);
  }
  for (const auto& [name, tensor] : stepper.report_state()) {
    all.emplace_back(kReport + name, tensor);
  }
  const Chance chance = get_chance(device);
  all.emplace_back("random/cpu", chance.cpu);
  if (chance.device.defined()) all.emplace_back("random/cuda", chance.device);
  return all;
}

models::Metadata state_metadata(const Place& place, const std::string& config_text,
                                const models::ModelConfig& model) {
  nlohmann::json best = place.has_best ? nlohmann::json(place.best) : nlohmann::json();
  return {{"format", "sinkhorn checkpoint 1"},
          {"step", std::to_string(place.step)},
          {"data", place.data},
          {"best", best.dump()},
          {"evaluated", std::to_string(place.evaluated)},
          {"max_length", std::to_string(model.max_length)},
          {"config", config_text}};
}

Place restore(const std::filesystem::path& path, Stepper& stepper, at::Device device) {
  const at::NoGradGuard no_grad;
  const models::SafeTensors file = models::load_safetensors(path);
  refuse_left_over(file, path, stepper.parameters());
  for (const auto& [name, tensor] : stepper.parameters()) {
    copy_checked(file, path, kModel + name, tensor);
  }
  for (const auto& [name, tensor] : stepper.optimizer().state()) {
    copy_checked(file, path, kOptimizer + name, tensor);
  }
  for (const auto& [name, tensor] : stepper.report_state()) {
    copy_checked(file, path, kReport + name, tensor);
  }
  Chance chance{find(file, path, "random/cpu"), {}};
  // A run that began on the CPU goes on from the seed on a GPU.
  if (device.is_cuda() && file.tensors.count("random/cuda") > 0) {
    chance.device = find(file, path, "random/cuda");
  }
  set_chance(chance, device);
  Place place;
  place.data = metadata_value(file, path, "data");
  const auto best = nlohmann::json::parse(metadata_value(file, path, "best"), nullptr, false);
  place.step = number_of(file, path, "step");
  place.has_best = best.is_number();
  if (place.has_best) place.best = best.get<double>();
  // Earlier versions saved what was evaluated only.
  const bool says = file.metadata.count("evaluated") > 0;
  place.evaluated = says ? number_of(file, path, "evaluated") : place.step;
  stepper.set_steps_done(place.step);
  return place;
}

void begin_with(const std::filesystem::path& path, Stepper& stepper) {
  const at::NoGradGuard no_grad;
  const models::SafeTensors file = models::load_safetensors(path);
  for (const auto& [name, tensor] : stepper.parameters()) {
    tensor.copy_(stored_parameter(file, path, name, tensor));
  }
  if (const auto others = left_over(file, path, stepper.parameters()); !others.empty()) {
    notice("train.init: " + path.string() + ": " + std::to_string(others.size()) +
           " tensors have no place in this model and are left out, " + others[0] + " for one");
  }
}

std::string checkpoint_config(const std::filesystem::path& path) {
  return metadata_value(models::load_safetensors(path), path, "config");
}

int64_t checkpoint_max_length(const std::filesystem::path& path) {
  return number_of(models::load_safetensors(path), path, "max_length");
}

int64_t load_parameters(const std::filesystem::path& path, models::Model& model, at::Device device,
                        at::ScalarType wide) {
  const models::SafeTensors file = models::load_safetensors(path);
  refuse_left_over(file, path, model.named_parameters().pairs());
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& stored = stored_parameter(file, path, item.key(), item.value());
    const bool half = at::isReducedFloatingType(stored.scalar_type());
    const at::ScalarType type = half && wide == at::kFloat ? stored.scalar_type() : wide;
    item.value().set_data(stored.to(device, type));
  }
  return number_of(file, path, "step");
}

}  // namespace sinkhorn::train
