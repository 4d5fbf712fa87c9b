#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "sinkhorn/error.h"

namespace sinkhorn::train {
namespace {

NamedTensors make_parameters(at::ScalarType type) {
  const auto generator = at::detail::createCPUGenerator(5);
  NamedTensors parameters;
  for (const auto& [name, shape] :
       std::vector<std::pair<std::string, std::vector<int64_t>>>{{"layer.weight", {3, 4}},
                                                                 {"layer.bias", {4}},
                                                                 {"embedding.weight", {5, 2}},
                                                                 {"stack", {2, 3, 2}},
                                                                 {"scale", {}}}) {
    parameters.emplace_back(name, at::randn(shape, generator, at::kDouble).to(type));
  }
  return parameters;
}

// Gradients of a step, the same for every optimizer and in every run.
void set_gradients(NamedTensors& parameters, int64_t step) {
  const auto generator = at::detail::createCPUGenerator(100 + static_cast<uint64_t>(step));
  for (auto& [name, parameter] : parameters) {
    parameter.mutable_grad() =
        at::randn(parameter.sizes(), generator, at::kDouble).to(parameter.scalar_type()) * 3;
  }
}

at::Tensor rate_of(double rate) { return at::full({}, rate, at::kFloat); }

OptimizerConfig config_of(const std::string& name) {
  OptimizerConfig config;
  config.name = name;
  config.weight_decay = 0.1;
  return config;
}

void expect_close(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  const double tolerance = found.scalar_type() == at::kDouble ? 1e-12 : 1e-6;
  const double error = (found.to(at::kDouble) - expected).abs().max().item<double>();
  EXPECT_LE(error, tolerance) << what;
}

// Element by element, as printed in the papers.
struct PlainAdam {
  double p, m = 0, v = 0;
  void step(double g, double rate, const OptimizerConfig& c, double decay, int t) {
    p -= rate * decay * p;
    m = c.beta1 * m + (1 - c.beta1) * g;
    v = c.beta2 * v + (1 - c.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(c.beta1, t));
    const double v_hat = v / (1 - std::pow(c.beta2, t));
    p -= rate * m_hat / (std::sqrt(v_hat) + c.epsilon);
  }
};

void check_adam(const std::string& kind, at::ScalarType type) {
  const OptimizerConfig config = config_of(kind);
  NamedTensors parameters = make_parameters(type);
  std::vector<std::vector<PlainAdam>> plain;
  for (const auto& [name, parameter] : parameters) {
    const at::Tensor values = parameter.to(at::kDouble).reshape(-1);
    plain.emplace_back();
    for (int64_t i = 0; i < values.numel(); ++i) plain.back().push_back({values[i].item<double>()});
  }
  const auto optimizer = make_optimizer(config, parameters);
  for (int t = 1; t <= 5; ++t) {
    set_gradients(parameters, t);
    const at::Tensor rate = rate_of(0.01 * t);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, parameter] = parameters[i];
      const bool decayed = kind == "adamw" && (name == "layer.weight" || name == "stack");
      const at::Tensor gradient = parameter.grad().to(at::kDouble).reshape(-1);
      for (size_t j = 0; j < plain[i].size(); ++j) {
        plain[i][j].step(gradient[static_cast<int64_t>(j)].item<double>(), rate.item<double>(),
                         config, decayed ? config.weight_decay : 0.0, t);
      }
    }
    optimizer->step(rate);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::vector<double> expected;
    for (const PlainAdam& element : plain[i]) expected.push_back(element.p);
    expect_close(parameters[i].second.reshape(-1), at::tensor(expected, at::kDouble),
                 parameters[i].first);
  }
}

TEST(Adam, FollowsTheFormula) {
  check_adam("adam", at::kDouble);
  check_adam("adam", at::kFloat);
}

TEST(AdamW, DecaysMatricesOnly) {
  check_adam("adamw", at::kDouble);
  check_adam("adamw", at::kFloat);
}

double mean_square(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum / static_cast<double>(values.size());
}

// One matrix of n rows, by loops; a vector is kept whole.
struct PlainAdafactor {
  size_t n, m;
  std::vector<double> p, r, c, v;
  bool factored;
  int t = 0;

  PlainAdafactor(size_t rows, size_t columns, std::vector<double> values, bool is_matrix)
      : n(rows), m(columns), p(std::move(values)), r(n), c(m), v(n * m), factored(is_matrix) {}

  void step(const std::vector<double>& g, double rate) {
    const double beta2 = 1 - std::pow(++t, -0.8);
    std::vector<double> row(n), column(m), u(n * m);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < m; ++j) {
        const double square = g[i * m + j] * g[i * m + j] + 1e-30;
        row[i] += square / static_cast<double>(m);
        column[j] += square / static_cast<double>(n);
        v[i * m + j] = beta2 * v[i * m + j] + (1 - beta2) * square;
      }
    }
    double row_mean = 0;
    for (size_t i = 0; i < n; ++i) {
      r[i] = beta2 * r[i] + (1 - beta2) * row[i];
      row_mean += r[i] / static_cast<double>(n);
    }
    for (size_t j = 0; j < m; ++j) c[j] = beta2 * c[j] + (1 - beta2) * column[j];
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < m; ++j) {
        const double second = factored ? r[i] * c[j] / row_mean : v[i * m + j];
        u[i * m + j] = g[i * m + j] / std::sqrt(second);
      }
    }
    const double clip = std::max(1.0, std::sqrt(mean_square(u)));
    const double scale = std::max(1e-3, std::sqrt(mean_square(p)));
    for (size_t k = 0; k < p.size(); ++k) p[k] -= rate * scale * u[k] / clip;
  }
};

std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kDouble).contiguous();
  const double* const data = flat.const_data_ptr<double>();
  return {data, data + flat.numel()};
}

void check_adafactor(const at::Tensor& initial, size_t rows, size_t columns, bool factored) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    NamedTensors parameters = {{"p", initial.to(type, /*non_blocking=*/false, /*copy=*/true)}};
    PlainAdafactor plain(rows, columns, values_of(parameters[0].second), factored);
    const auto optimizer = make_optimizer(config_of("adafactor"), parameters);
    for (int t = 1; t <= 6; ++t) {
      set_gradients(parameters, t);
      const at::Tensor rate = rate_of(0.1 / t);
      plain.step(values_of(parameters[0].second.grad()), rate.item<double>());
      optimizer->step(rate);
    }
    expect_close(parameters[0].second.reshape(-1), at::tensor(plain.p, at::kDouble), "p");
  }
}

TEST(Adafactor, FollowsTheFormula) {
  at::manual_seed(3);
  check_adafactor(at::randn({3, 4}, at::kDouble), 3, 4, /*factored=*/true);
  check_adafactor(at::randn({1, 6}, at::kDouble), 1, 6, /*factored=*/true);
  check_adafactor(at::randn({6}, at::kDouble), 1, 6, /*factored=*/false);
  check_adafactor(at::zeros({2, 2}, at::kDouble), 2, 2, /*factored=*/true);  // steps of eps2
}

TEST(Adafactor, KeepsRowsAndColumnsOnly) {
  const NamedTensors parameters = {{"w", at::ones({7, 100, 50})}, {"b", at::ones({9})}};
  int64_t elements = 0;
  for (const auto& [name, tensor] : make_optimizer(config_of("adafactor"), parameters)->state()) {
    elements += tensor.numel();
  }
  EXPECT_EQ(elements, 1 + 7 * 100 + 7 * 50 + 9);
}

class EveryOptimizer : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Names, EveryOptimizer, testing::Values("adam", "adamw", "adafactor"));

TEST_P(EveryOptimizer, LeavesParametersWithoutGradientsAlone) {
  NamedTensors parameters = make_parameters(at::kFloat);
  const auto optimizer = make_optimizer(config_of(GetParam()), parameters);
  const at::Tensor before = parameters[0].second.clone();
  set_gradients(parameters, 1);
  parameters[0].second.mutable_grad() = at::Tensor();
  const at::Tensor other = parameters[1].second.clone();
  optimizer->step(rate_of(0.1));
  EXPECT_TRUE(at::equal(parameters[0].second, before));
  EXPECT_FALSE(at::equal(parameters[1].second, other));
}

TEST_P(EveryOptimizer, WorksOnLeavesOfAutogradAndOddGradientStrides) {
  NamedTensors plain = {{"w", at::arange(12, at::kFloat).reshape({3, 4})}};
  NamedTensors leaf = {{"w", plain[0].second.clone().set_requires_grad(true)}};
  const at::Tensor gradient = at::arange(12, at::kFloat).reshape({4, 3}).t() - 5;
  plain[0].second.mutable_grad() = gradient.contiguous();
  leaf[0].second.mutable_grad() = gradient;
  make_optimizer(config_of(GetParam()), plain)->step(rate_of(0.1));
  make_optimizer(config_of(GetParam()), leaf)->step(rate_of(0.1));
  EXPECT_TRUE(at::equal(plain[0].second, leaf[0].second));
  EXPECT_TRUE(leaf[0].second.requires_grad());
}

TEST_P(EveryOptimizer, RestoredStateContinuesToTheBit) {
  NamedTensors whole = make_parameters(at::kFloat);
  NamedTensors split = make_parameters(at::kFloat);
  const auto run = [](Optimizer& optimizer, NamedTensors& parameters, int64_t from, int64_t to) {
    for (int64_t t = from; t <= to; ++t) {
      set_gradients(parameters, t);
      optimizer.step(rate_of(0.01));
    }
  };
  const auto uninterrupted = make_optimizer(config_of(GetParam()), whole);
  run(*uninterrupted, whole, 1, 8);

  const auto first = make_optimizer(config_of(GetParam()), split);
  run(*first, split, 1, 4);
  const auto second = make_optimizer(config_of(GetParam()), split);
  const NamedTensors saved = first->state();
  const NamedTensors live = second->state();
  ASSERT_EQ(saved.size(), live.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(saved[i].first, live[i].first);
    live[i].second.copy_(saved[i].second);
  }
  run(*second, split, 5, 8);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_TRUE(at::equal(whole[i].second, split[i].second)) << whole[i].first;
  }
}

// At the first step and later on, whatever the gradients are.
TEST_P(EveryOptimizer, ADivisorThatIsNoNumberHoldsEverything) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    NamedTensors parameters = make_parameters(type);
    const auto optimizer = make_optimizer(config_of(GetParam()), parameters);
    for (int64_t steps_before = 0; steps_before < 2; ++steps_before) {
      NamedTensors before;
      for (const auto& list : {parameters, optimizer->state()}) {
        for (const auto& [name, tensor] : list) before.emplace_back(name, tensor.clone());
      }
      for (const double value : {1.0, std::nan("")}) {
        set_gradients(parameters, 7);
        for (auto& [name, parameter] : parameters) parameter.mutable_grad().mul_(value);
        optimizer->step(rate_of(0.1), at::full({}, std::nan(""), type));
      }
      NamedTensors after = parameters;
      for (const auto& item : optimizer->state()) after.push_back(item);
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(before[i].second, after[i].second)) << before[i].first;
      }
      set_gradients(parameters, 8);
      optimizer->step(rate_of(0.1), at::ones({}, type));
      EXPECT_FALSE(at::equal(before[0].second, parameters[0].second)) << "steps are made again";
    }
  }
}

TEST(Optimizer, StateNames) {
  const NamedTensors parameters = {{"w", at::ones({2, 3})}, {"b", at::ones({3})}};
  const auto names = [&](const std::string& kind) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : make_optimizer(config_of(kind), parameters)->state()) {
      names.push_back(name);
    }
    return names;
  };
  const std::vector<std::string> adam = {"exp_avg/w", "exp_avg_sq/w", "step/w",
                                         "exp_avg/b", "exp_avg_sq/b", "step/b"};
  EXPECT_EQ(names("adam"), adam);
  EXPECT_EQ(names("adamw"), adam);
  EXPECT_EQ(names("adafactor"), (std::vector<std::string>{"step", "row_moment/w", "column_moment/w",
                                                          "second_moment/b"}));
}

std::string refusal(const OptimizerConfig& config, const NamedTensors& parameters) {
  try {
    make_optimizer(config, parameters);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Optimizer, RefusesNonsense) {
  const NamedTensors good = {{"w", at::ones({2})}};
  EXPECT_EQ(refusal(config_of("adam"), good), "");
  EXPECT_EQ(refusal(config_of("sgd"), good),
            "optimizer.name: 'sgd', expected adamw, adam or adafactor");
  OptimizerConfig bad = config_of("adam");
  bad.beta2 = 1.0;
  EXPECT_EQ(refusal(bad, good), "optimizer.beta2: 1, expected at least 0 and below 1");
  EXPECT_NE(refusal(config_of("adam"), {{"h", at::ones({2}, at::kBFloat16)}}), "");
  EXPECT_NE(refusal(config_of("adam"), {}), "");
}

TEST(Schedule, HandWorkedSteps) {
  OptimizerConfig config;
  config.rate = 2.0;
  config.warmup = 4;
  config.final_rate = 0.1;
  const auto at_step = [&](const char* schedule, int64_t step) {
    config.schedule = schedule;
    return learning_rate(config, step, /*steps=*/12, /*width=*/64);
  };
  for (const char* schedule : {"constant", "linear", "cosine"}) {
    EXPECT_DOUBLE_EQ(at_step(schedule, 1), 0.5) << schedule;
    EXPECT_DOUBLE_EQ(at_step(schedule, 4), 2.0) << schedule;
  }
  EXPECT_DOUBLE_EQ(at_step("constant", 12), 2.0);
  EXPECT_DOUBLE_EQ(at_step("linear", 8), 1.1);
  EXPECT_DOUBLE_EQ(at_step("linear", 12), 0.2);
  EXPECT_DOUBLE_EQ(at_step("linear", 100), 0.2);
  EXPECT_DOUBLE_EQ(at_step("cosine", 6), 2.0 * (0.1 + 0.9 * (0.5 + std::sqrt(0.125))));
  EXPECT_DOUBLE_EQ(at_step("cosine", 8), 1.1);
  EXPECT_DOUBLE_EQ(at_step("cosine", 12), 0.2);
  EXPECT_DOUBLE_EQ(at_step("noam", 1), 2.0 * 2.0 / 8 * 1 / 8);  // 4^-1.5 = 1/8
  EXPECT_DOUBLE_EQ(at_step("noam", 4), 2.0 * 2.0 / 8 / 2);
  EXPECT_DOUBLE_EQ(at_step("noam", 9), 2.0 * 2.0 / 8 / 3);
  EXPECT_DOUBLE_EQ(at_step("rsqrt", 1), 1.0);
  EXPECT_DOUBLE_EQ(at_step("rsqrt", 4), 1.0);
  EXPECT_DOUBLE_EQ(at_step("rsqrt", 16), 0.5);
}

TEST(Schedule, WithoutWarmUp) {
  OptimizerConfig config;
  config.rate = 1.0;
  config.warmup = 0;
  for (const char* schedule : {"constant", "noam", "rsqrt"}) {
    config.schedule = schedule;
    EXPECT_DOUBLE_EQ(learning_rate(config, 1, 10, 4), 1.0) << schedule;
  }
  config.schedule = "linear";
  EXPECT_DOUBLE_EQ(learning_rate(config, 10, 10, 4), 0.1);
}

TEST(Schedule, UnknownNameListsTheKnown) {
  OptimizerConfig config;
  config.schedule = "step";
  try {
    learning_rate(config, 1, 10, 4);
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "optimizer.schedule: 'step', expected constant, linear, cosine, noam or rsqrt");
  }
}

}  // namespace
}  // namespace sinkhorn::train
