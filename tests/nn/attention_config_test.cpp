// The presets are the words of the specification, and what does not go together is refused with
// its reason.
#include "sinkhorn/nn/attention_config.h"

#include <functional>
#include <limits>

#include "nn/support.h"
#include "sinkhorn/nn/attention.h"

namespace sinkhorn::nn {
namespace {

using testing::refusal;

TEST(AttentionPreset, Prefix) {
  for (const bool decoder : {false, true}) {
    const AttentionConfig c = attention_preset("prefix", decoder);
    EXPECT_EQ(c.kind, "sinkhorn");
    EXPECT_EQ(c.block, 64);
    EXPECT_EQ(c.max_blocks, 0);
    EXPECT_EQ(c.window, 0);
    EXPECT_EQ(c.sort_net, "linear");
    EXPECT_EQ(c.pooling, "mean");
    EXPECT_EQ(c.iterations, 5);
    EXPECT_EQ(c.temperature, 0.75);
    EXPECT_TRUE(c.gumbel);
    EXPECT_EQ(c.causal, "strict");
    EXPECT_EQ(c.columns, decoder ? "prefix" : "full");
    EXPECT_EQ(c.combine, "concat");
    EXPECT_EQ(c.stride, 64);
    EXPECT_EQ(c.summary, 8);
    EXPECT_FALSE(c.merged);
    EXPECT_FALSE(c.tie_kv);
  }
}

TEST(AttentionPreset, DefaultAndWindowed) {
  for (const std::string name : {"default", "windowed"}) {
    const AttentionConfig decoder = attention_preset(name, true);
    EXPECT_EQ(decoder.window, 1);
    EXPECT_EQ(decoder.sort_net, "bilinear");
    EXPECT_EQ(decoder.pooling, "recent");
    EXPECT_EQ(decoder.columns, "prior");
    EXPECT_EQ(decoder.causal, "strict");
    EXPECT_EQ(decoder.gumbel, name == "windowed");
    const AttentionConfig encoder = attention_preset(name, false);
    EXPECT_EQ(encoder.window, 1);
    EXPECT_EQ(encoder.sort_net, "bilinear");
    EXPECT_EQ(encoder.pooling, "mean");
    EXPECT_EQ(encoder.columns, "none");
    EXPECT_EQ(encoder.gumbel, name == "windowed");
    const AttentionConfig classifier = attention_preset(name, false, true);
    EXPECT_EQ(classifier.window, 0);
    EXPECT_EQ(classifier.sort_net, "bilinear");
    EXPECT_EQ(classifier.columns, "none");
    EXPECT_TRUE(classifier.gumbel);
  }
}

TEST(AttentionPreset, Paper) {
  for (const bool decoder : {false, true}) {
    const AttentionConfig c = attention_preset("paper", decoder);
    EXPECT_EQ(c.pooling, "sum");
    EXPECT_EQ(c.causal, "inclusive");
    EXPECT_EQ(c.combine, "logits");
    EXPECT_EQ(c.sort_net, "linear");
    EXPECT_TRUE(c.gumbel);
  }
}

TEST(AttentionPreset, EveryPresetMakesAModule) {
  for (const char* name : {"default", "windowed", "prefix", "paper"}) {
    for (const bool decoder : {false, true}) {
      const AttentionConfig c = attention_preset(name, decoder);
      const SinkhornAttention attention(c, {8, 2, 128, decoder, 0.0});
      EXPECT_EQ(attention.config().columns, c.columns) << name;
    }
  }
}

TEST(AttentionPreset, AnotherNameIsRefused) {
  EXPECT_EQ(refusal([] { attention_preset("papers", true); }),
            "attention: preset is 'papers'; it must be one of default, windowed, prefix, paper");
}

struct Refused {
  bool decoder;
  std::function<void(AttentionConfig&)> change;
  std::string reason;
};

TEST(CheckAttention, UnknownWords) {
  const std::vector<Refused> cases = {
      {true, [](auto& c) { c.kind = "dense"; },
       "kind is 'dense'; it must be one of sinkhorn, mixture, sortcut, full, local, window, "
       "sparse"},
      {true, [](auto& c) { c.sort_net = "deep"; },
       "sort_net is 'deep'; it must be one of linear, linear_relu, mlp, mlp_relu, bilinear"},
      {true, [](auto& c) { c.pooling = "max"; },
       "pooling is 'max'; it must be one of mean, sum, recent"},
      {true, [](auto& c) { c.causal = "none"; },
       "causal is 'none'; it must be one of strict, inclusive"},
      {true, [](auto& c) { c.columns = "rows"; },
       "columns is 'rows'; it must be one of auto, full, prefix, prior, none"},
      {true, [](auto& c) { c.combine = "add"; },
       "combine is 'add'; it must be one of concat, logits, outputs"},
  };
  for (const Refused& r : cases) {
    AttentionConfig config;
    r.change(config);
    EXPECT_EQ(refusal([&] { check_attention(config, r.decoder); }), "attention: " + r.reason);
  }
}

TEST(CheckAttention, NumbersOutOfRange) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const std::vector<Refused> cases = {
      {true, [](auto& c) { c.block = 0; }, "block is 0; it must be at least 1"},
      {true, [](auto& c) { c.block = INT64_MAX; },
       "block is 9223372036854775807; it must be at most 16777216"},
      {true, [](auto& c) { c.window = 16777217; },
       "window is 16777217; it must be at most 16777216"},
      {true, [](auto& c) { c.max_blocks = -1; }, "max_blocks is -1; it must be at least 0"},
      {true, [](auto& c) { c.window = -1; }, "window is -1; it must be at least 0"},
      {true, [](auto& c) { c.iterations = -1; }, "iterations is -1; it must be at least 0"},
      {true, [](auto& c) { c.budget = 0; }, "budget is 0; it must be at least 1"},
      {true, [](auto& c) { c.stride = 0; }, "stride is 0; it must be at least 1"},
      {true, [](auto& c) { c.summary = 0; }, "summary is 0; it must be at least 1"},
      {true, [](auto& c) { c.temperature = 0; }, "temperature must be greater than 0"},
      {true, [](auto& c) { c.temperature = kNaN; }, "temperature must be greater than 0"},
      {true, [](auto& c) { c.kind = "sparse", c.stride = 4, c.summary = 5; },
       "summary (5) cannot exceed stride (4)"},
  };
  for (const Refused& r : cases) {
    AttentionConfig config;
    r.change(config);
    EXPECT_EQ(refusal([&] { check_attention(config, r.decoder); }), "attention: " + r.reason);
  }
}

TEST(CheckAttention, WhatDoesNotGoTogether) {
  const std::vector<Refused> cases = {
      {true, [](auto& c) { c.kind = "sortcut"; },
       "sortcut cannot be used in a decoder: every query reads the same few sorted blocks of the "
       "whole sequence, so each new token would need all of it computed again"},
      {true, [](auto& c) { c.causal = "inclusive", c.window = 1; },
       "causal 'inclusive' sorts the own block in and needs window 0; set it, or use causal "
       "'strict'"},
      {true, [](auto& c) { c.combine = "logits"; },
       "combine 'logits' adds a query's own block to the sorted one and needs causal 'inclusive'; "
       "the first blocks of 'strict' have no sorted one"},
      {false, [](auto& c) { c.combine = "logits", c.window = 1; },
       "combine 'logits' adds block to block and needs window 0"},
      {false, [](auto& c) { c.pooling = "recent"; },
       "pooling 'recent' looks back and is for decoders only"},
      {false, [](auto& c) { c.columns = "prefix"; },
       "columns 'prefix' is causal and for decoders only; encoders take 'full' or 'none'"},
      {false, [](auto& c) { c.columns = "prior"; },
       "columns 'prior' is causal and for decoders only; encoders take 'full' or 'none'"},
  };
  for (const Refused& r : cases) {
    AttentionConfig config;
    r.change(config);
    EXPECT_EQ(refusal([&] { check_attention(config, r.decoder); }), "attention: " + r.reason);
    EXPECT_EQ(refusal([&] { SinkhornAttention(config, {8, 2, 128, r.decoder, 0.0}); }),
              "attention: " + r.reason);
    // A kind that does not sort does not mind.
    config.kind = "local";
    EXPECT_EQ(refusal([&] { check_attention(config, r.decoder); }), "");
  }
}

TEST(CheckAttention, HeadsMustShareTheWidth) {
  EXPECT_EQ(refusal([] { SinkhornAttention({}, {10, 4, 128, true, 0.0}); }),
            "attention: width 10 is not a multiple of heads 4");
}

}  // namespace
}  // namespace sinkhorn::nn
