// POST /v1/completions, as OpenAI's: what a request says, and the objects that answer it. No HTTP
// and no Torch here.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "serve/job.h"

namespace sinkhorn::serve {

struct CompletionLimits {
  std::string model;  // the only one there is
  int64_t max_tokens = 4096;
};

struct CompletionRequest {
  std::vector<std::string> prompts;  // none: begin as the training data does
  int64_t choices = 1;               // of each prompt
  Asked asked;                       // all but its sequences
  bool stream = false, echo = false, stream_usage = false;
};

int64_t unix_seconds();  // now, as these objects tell it

// Throws Refusal.
CompletionRequest read_completion(const std::string& body, const CompletionLimits& limits);

// The answers to one request while they are made. Choice i is sequence i of the job.
class CompletionAnswer {
 public:
  CompletionAnswer(const CompletionRequest& request, std::string model, int64_t prompt_tokens);

  // Takes in events; with streaming, the server-sent events for them.
  std::string add(const std::vector<Event>& events);
  // All that is left to send: the whole answer, or the end of the stream.
  std::string finish() const;

 private:
  struct Choice {
    std::string text, finish;
    int64_t tokens = 0;
    bool shown = false;
  };
  nlohmann::ordered_json object(nlohmann::ordered_json choices) const;
  nlohmann::ordered_json usage() const;
  std::string chunk(const Event& event, Choice& choice, const std::string& echoed) const;

  bool stream_, stream_usage_;
  std::string id_, model_;
  int64_t created_, prompt_tokens_;
  std::vector<std::string> echoes_;  // of every choice
  std::vector<Choice> choices_;
};

}  // namespace sinkhorn::serve
