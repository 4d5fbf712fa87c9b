#include "serve/completion.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <sstream>

#include "serve/fields.h"

namespace sinkhorn::serve {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostPrompts = 32, kMostStops = 16;
constexpr int64_t kMostChoices = 32, kMostSequences = 64;
constexpr int64_t kUsualTokens = 256;

uint64_t random_number() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

std::string hex(uint64_t number) {
  std::ostringstream text;
  text << std::hex << number;
  return text.str();
}

// What others offer and we do not: values that change nothing are taken.
void refuse_unsupported(Fields& fields) {
  fields.unsupported("logprobs");
  fields.unsupported("logit_bias", nlohmann::json::object());
  fields.unsupported("suffix", "");
  for (const char* name : {"presence_penalty", "frequency_penalty"}) fields.unsupported(name, 0);
  fields.unsupported("best_of", 1);
}

void read_sampling(Fields& fields, Asked& asked) {
  generate::SamplingOptions& sampling = asked.sampling;
  sampling.temperature = fields.number("temperature", 1.0);
  sampling.top_p = fields.number("top_p", 1.0);
  sampling.top_k = fields.integer("top_k", 0, 0, INT64_MAX);
  sampling.repetition_penalty = fields.number("repetition_penalty", 1.0);
  sampling.seed = fields.natural("seed", random_number());
  try {
    generate::check_sampling(sampling);
  } catch (const UsageError& error) {  // "top_p is 0; ..."
    const std::string message = error.what();
    throw Refusal(400, message, message.substr(0, message.find(' ')));
  }
}

ordered_json choice_object(size_t index, const std::string& text, const std::string& finish) {
  return {{"text", text},
          {"index", index},
          {"logprobs", nullptr},
          {"finish_reason", finish.empty() ? ordered_json() : ordered_json(finish)}};
}

}  // namespace

int64_t unix_seconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(now).count();
}

CompletionRequest read_completion(const std::string& body, const CompletionLimits& limits) {
  Fields fields(body);
  CompletionRequest request;
  const std::string model = fields.text("model", limits.model);
  if (model != limits.model) {
    throw Refusal(404, "there is no model '" + model + "' here; this is " + limits.model, "model",
                  "model_not_found");
  }
  request.prompts = fields.texts("prompt", 1, kMostPrompts);
  request.choices = fields.integer("n", 1, 1, kMostChoices);
  request.asked.max_tokens =
      fields.integer("max_tokens", std::min(kUsualTokens, limits.max_tokens), 1, limits.max_tokens);
  read_sampling(fields, request.asked);
  request.asked.stops = fields.texts("stop", 0, kMostStops);
  for (const std::string& stop : request.asked.stops) {
    if (stop.empty()) throw Refusal(400, "stop is empty; it must be some text", "stop");
  }
  request.asked.ignore_end = fields.flag("ignore_end", false);
  request.stream = fields.flag("stream", false);
  request.echo = fields.flag("echo", false);
  request.stream_usage = fields.inner_flag("stream_options", "include_usage");
  fields.ignored("user");
  refuse_unsupported(fields);
  fields.check_all_known();
  const int64_t prompts = std::max<int64_t>(1, static_cast<int64_t>(request.prompts.size()));
  if (prompts * request.choices > kMostSequences) {
    throw Refusal(400,
                  "n times the prompts is " + std::to_string(prompts * request.choices) +
                      "; at most " + std::to_string(kMostSequences) + " texts are made at once",
                  "n");
  }
  return request;
}

CompletionAnswer::CompletionAnswer(const CompletionRequest& request, std::string model,
                                   int64_t prompt_tokens)
    : stream_(request.stream),
      stream_usage_(request.stream_usage),
      id_("cmpl-" + hex(random_number())),
      model_(std::move(model)),
      created_(unix_seconds()),
      prompt_tokens_(prompt_tokens) {
  const std::vector<std::string> none = {""};
  for (const std::string& prompt : request.prompts.empty() ? none : request.prompts) {
    echoes_.insert(echoes_.end(), static_cast<size_t>(request.choices), request.echo ? prompt : "");
  }
  choices_.resize(echoes_.size());
}

ordered_json CompletionAnswer::object(ordered_json choices) const {
  return {{"id", id_},
          {"object", "text_completion"},
          {"created", created_},
          {"model", model_},
          {"choices", std::move(choices)}};
}

ordered_json CompletionAnswer::usage() const {
  int64_t made = 0;
  for (const Choice& choice : choices_) made += choice.tokens;
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", made},
          {"total_tokens", prompt_tokens_ + made}};
}

std::string CompletionAnswer::chunk(const Event& event, Choice& choice,
                                    const std::string& echoed) const {
  const std::string text = (choice.shown ? "" : echoed) + event.text;
  choice.shown = true;
  if (text.empty() && event.finish.empty()) return "";
  ordered_json choices = ordered_json::array();
  choices.push_back(choice_object(event.sequence, text, event.finish));
  return "data: " + dumped(object(std::move(choices))) + "\n\n";
}

std::string CompletionAnswer::add(const std::vector<Event>& events) {
  std::string chunks;
  for (const Event& event : events) {
    Choice& choice = choices_.at(event.sequence);
    choice.tokens = event.tokens;
    choice.finish = event.finish;
    if (stream_) {
      chunks += chunk(event, choice, echoes_[event.sequence]);
    } else {
      choice.text += event.text;
    }
  }
  return chunks;
}

std::string CompletionAnswer::finish() const {
  if (stream_) {
    ordered_json last = object(ordered_json::array());
    last["usage"] = usage();
    return (stream_usage_ ? "data: " + dumped(last) + "\n\n" : "") + "data: [DONE]\n\n";
  }
  ordered_json choices = ordered_json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    choices.push_back(choice_object(i, echoes_[i] + choices_[i].text, choices_[i].finish));
  }
  ordered_json whole = object(std::move(choices));
  whole["usage"] = usage();
  return dumped(whole) + "\n";
}

}  // namespace sinkhorn::serve
