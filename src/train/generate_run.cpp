#include "train/generate_run.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

#include "sinkhorn/error.h"
#include "sinkhorn/generate.h"
#include "tasks/text_stream.h"
#include "tasks/tokenizer.h"
#include "train/device.h"
#include "train/open_run.h"
#include "train/prompt.h"

namespace sinkhorn::train {
namespace {

constexpr int64_t kImageValues = 3 * 32 * 32, kRowValues = 3 * 32;
constexpr int64_t kTextTokens = 256;
constexpr int64_t kMissedEnd = 8;        // room for a list that misses its end
constexpr int64_t kCapacityStep = 1024;  // the same state for requests of about the same length

// What is to be decoded, worked out from the request.
struct Plan {
  std::vector<int64_t> source;  // Seq2Seq: what the encoder reads
  std::vector<int64_t> prompt;  // what the decoder begins with
  std::vector<int32_t> shown;   // the part of the prompt that a text's spaces depend on
  generate::SamplingOptions sampling;
  generate::StopOptions stop;
};

std::vector<int32_t> read_prompt(const tasks::Task& task, const GenerateRequest& request) {
  if (!request.image.empty()) {
    std::vector<int32_t> half;
    for (int64_t i = 0; i < kImageValues / 2; ++i) {
      half.push_back(request.image[static_cast<size_t>(i)] + tasks::kFirstByte);
    }
    return half;
  }
  return request.prompt.has_value() ? prompt_ids(task, *request.prompt) : std::vector<int32_t>();
}

// Tokens to make where the request leaves it to the task.
int64_t usual_tokens(const std::string& task, const Plan& plan, size_t given, int64_t capacity) {
  if (task == "sort") return static_cast<int64_t>(plan.source.size()) + kMissedEnd;
  if (task == "recall") return 1;  // an answer
  if (task != "pixels") return kTextTokens;
  const int64_t rows = std::min(kImageValues, capacity) / kRowValues;  // that the model can hold
  return rows * kRowValues - static_cast<int64_t>(given);
}

void check_request(const std::string& task, const GenerateRequest& request, int64_t capacity) {
  const bool asks = task == "sort" || task == "recall";
  if (asks && request.prompt.value_or("").empty()) {
    throw UsageError("a model of the task " + task + " needs a prompt: " +
                     (task == "sort" ? "numbers to sort, as in --prompt \"5 3 1\""
                                     : "pairs and a key, as in --prompt \"k1 v2 f0 k1\""));
  }
  if (task != "pixels") {
    if (!request.image.empty()) throw UsageError("--image is for models of the task pixels");
    return;
  }
  if (request.max_tokens.has_value()) {
    throw UsageError("--max-tokens: an image is made whole");
  }
  const int64_t least = request.image.empty() ? kRowValues : kImageValues;
  if (capacity < least) {
    throw UsageError("this model reads " + std::to_string(capacity) + " values; " +
                     (request.image.empty() ? "a row of an image" : "an image") + " has " +
                     std::to_string(least));
  }
}

Plan make_plan(const OpenRun& run, const std::string& task, const GenerateRequest& request,
               const std::vector<int32_t>& given) {
  const tasks::Framing frame = tasks::framing(task);
  const int64_t capacity = run.model->config().max_length;
  Plan plan;
  plan.prompt = {frame.begin};
  if (run.task->info().model == tasks::ModelKind::kSeq2Seq) {
    plan.source.assign(given.begin(), given.end());
    check_prompt_fits(given.size(), capacity, "tokens, its end included");
  } else {
    plan.prompt.insert(plan.prompt.end(), given.begin(), given.end());
    check_prompt_fits(given.size(), capacity - 1, "tokens");
    if (task == "lm" || task == "text") plan.shown = given;
  }
  const bool asks = task == "sort" || task == "recall";
  plan.sampling = request.sampling;
  plan.sampling.temperature = request.temperature.value_or(asks ? 0.0 : 1.0);
  plan.stop = task_stops(task, request.ignore_end);
  // A model holds no more, however many are asked for.
  plan.stop.max_tokens = std::min(
      request.max_tokens.value_or(usual_tokens(task, plan, given.size(), capacity)), capacity);
  if (plan.stop.max_tokens < 1) refuse_prompt("leaves nothing to be made");
  plan.stop.interrupted = request.interrupted;
  return plan;
}

generate::Decoder decoder_of(const OpenRun& run, const generate::DecoderOptions& options) {
  if (auto language = std::dynamic_pointer_cast<models::LanguageModel>(run.model)) {
    return generate::Decoder(language, options);
  }
  return generate::Decoder(std::dynamic_pointer_cast<models::Seq2Seq>(run.model), options);
}

std::string gibibytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", static_cast<double>(bytes) * 0x1p-30);
  return text;
}

// A system that promises memory it does not have would end the program without a word, so one
// slot's state is measured before that of all is asked for.
void check_memory(const OpenRun& run, generate::DecoderOptions options) {
  const int64_t batch = std::exchange(options.batch, 1);
  if (batch == 1) return;
  options.graph = false;
  const int64_t needed = batch * decoder_of(run, options).state_bytes();
  const int64_t available = available_memory(run.device);
  if (available == 0 || needed <= available) return;
  throw Error(std::to_string(batch) + " sequences of up to " + std::to_string(options.capacity) +
              " tokens need " + gibibytes(needed) + " of memory, " + gibibytes(available) +
              " are free; ask for fewer --samples or --beams, or for fewer --max-tokens");
}

generate::Decoder make_decoder(const OpenRun& run, const Plan& plan, int64_t batch) {
  const int64_t needed = static_cast<int64_t>(plan.prompt.size()) + plan.stop.max_tokens;
  generate::DecoderOptions options;
  options.batch = batch;
  options.capacity = std::min((needed + kCapacityStep - 1) / kCapacityStep * kCapacityStep,
                              run.model->config().max_length);
  options.compute = run.context.compute;
  check_memory(run, options);
  return decoder_of(run, options);
}

void read_source(generate::Decoder& decoder, const Plan& plan) {
  if (plan.source.empty()) return;
  const at::Tensor row = at::tensor(plan.source, at::kLong).unsqueeze(0).to(decoder.device());
  decoder.read(row, std::nullopt, {0});
}

// The texts of all samples while they grow.
class Texts {
 public:
  Texts(const tasks::Task& task, const Plan& plan, const GenerateRequest& request,
        const OnText& on_text)
      : on_text_(on_text),
        begun_(task, plan.shown, request.stop_texts),
        streams_(static_cast<size_t>(request.samples), begun_),
        texts_(static_cast<size_t>(request.samples)) {}

  const tasks::TextStream& begun() const { return begun_; }

  bool add(int64_t row, int64_t id) {
    const size_t r = static_cast<size_t>(row);
    show(r, streams_[r].push(static_cast<int32_t>(id)));
    return !streams_[r].stopped();
  }

  GeneratedText finish(size_t row, const generate::Generated& made) {
    show(row, streams_[row].finish());
    std::string ended = "interrupted";
    if (made.ended == generate::Ended::kLength) ended = "length";
    if (made.ended == generate::Ended::kStopToken || streams_[row].stopped()) ended = "stop";
    return {texts_[row], made.ids, made.log_probability, ended};
  }

 private:
  void show(size_t row, const std::string& piece) {
    texts_[row] += piece;
    if (on_text_ && !piece.empty()) on_text_(static_cast<int64_t>(row), piece);
  }

  const OnText& on_text_;
  tasks::TextStream begun_;  // behind the prompt
  std::vector<tasks::TextStream> streams_;
  std::vector<std::string> texts_;
};

// Whether a beam's text has come to a stop. Beams grow together, a token a round, so that the texts
// of the round before are all that it takes.
class BeamStops {
 public:
  explicit BeamStops(const tasks::TextStream& begun) : now_{{{}, begun}} {}

  bool operator()(const std::vector<int64_t>& ids) {
    if (ids.size() > length_) {
      length_ = ids.size();
      before_ = std::move(now_);
      now_.clear();
    }
    tasks::TextStream text = before_.at({ids.begin(), ids.end() - 1});
    text.push(static_cast<int32_t>(ids.back()));
    const bool stopped = text.stopped();
    if (!stopped) now_.emplace(ids, std::move(text));
    return stopped;
  }

 private:
  size_t length_ = 0;  // of those in now_
  std::map<std::vector<int64_t>, tasks::TextStream> before_, now_;
};

std::vector<generate::Generated> decode(generate::Decoder& decoder, const Plan& plan,
                                        const GenerateRequest& request, Texts& texts) {
  const size_t samples = static_cast<size_t>(request.samples);
  read_source(decoder, plan);
  if (!request.beam.has_value()) {
    return generate::sample_prompt(decoder, plan.prompt, request.samples, plan.sampling, plan.stop,
                                   [&](int64_t row, int64_t id) { return texts.add(row, id); });
  }
  generate::OnExtension ends;
  if (!request.stop_texts.empty()) ends = BeamStops(texts.begun());
  std::vector<generate::Generated> best =
      generate::beam_search(decoder, plan.prompt, *request.beam, plan.stop, ends);
  if (best.size() > samples) best.resize(samples);
  for (size_t i = 0; i < best.size(); ++i) {
    for (const int64_t id : best[i].ids) texts.add(static_cast<int64_t>(i), id);
  }
  return best;
}

}  // namespace

Generation generate_run(const RunConfig& config, const GenerateRequest& request,
                        const OnText& on_text) {
  generate::check_sampling(request.sampling);  // before a model is read
  const OpenRun run = open_run(config, request.checkpoint);
  if (run.task->info().model == tasks::ModelKind::kClassifier) {
    throw UsageError(config.train.run + ": a classifier generates nothing; see classify");
  }
  const std::string& task = config.task.name;
  check_request(task, request, run.model->config().max_length);
  Generation result{run.checkpoint.string(),
                    run.step,
                    request.prompt.value_or(""),
                    read_prompt(*run.task, request),
                    {}};
  const Plan plan = make_plan(run, task, request, result.given);
  generate::Decoder decoder =
      make_decoder(run, plan, request.beam.has_value() ? request.beam->beams : request.samples);
  Texts texts(*run.task, plan, request, on_text);
  const std::vector<generate::Generated> made = [&] {
    try {
      return decode(decoder, plan, request, texts);
    } catch (const UsageError&) {
      throw;
    } catch (const Error& error) {  // which knows nothing of files
      throw Error(result.checkpoint + ", step " + std::to_string(run.step) + ": " + error.what());
    }
  }();
  for (size_t i = 0; i < made.size(); ++i) result.samples.push_back(texts.finish(i, made[i]));
  return result;
}

}  // namespace sinkhorn::train
