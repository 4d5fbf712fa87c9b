// Decoding: tokens a second beside the same model with full attention and a cache of keys and
// values, and beside recomputing everything for each token. Full attention is measured with every
// attention there is for one query, our own kernel and those of Torch; "best" marks the one that
// counts.
//
//   bench_generate [--contexts 1024,4096,16384,65536] [--batches 1,64] [--tokens 640]
//                  [--block 64] [--seconds 2] [--device cuda] [--model base] [--note TEXT]
//                  [--out FILE]
//
// A token counts from its id on the host to the next one's: ids are sent, the step runs, the
// largest logit is chosen and fetched. Weights are random, products and caches bf16. In a batch the
// slots stand at different offsets of their blocks, so that blocks begin in nearly every step. What
// is cached is compared with the full pass first; nothing is printed on a mismatch.
#include "sinkhorn/generate.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <sstream>

#include "sdpa_decoder.h"
#include "sinkhorn/error.h"

namespace sinkhorn {
namespace {

using bench::Sdpa;
using bench::SdpaDecoder;
using generate::Decoder;
using models::LanguageModel;
using Clock = std::chrono::steady_clock;
using Step = std::function<at::Tensor(const at::Tensor&)>;  // ids [B] -> logits [B, V]

constexpr int64_t kVocab = 32000;
// The capacity is such that the past is shared among CTAs, as it is when timed.
constexpr int64_t kCheckedPrompt = 300, kCheckedTokens = 200, kCheckedCapacity = 2048;
constexpr int64_t kTokensTogether = 1 << 20;  // that are recomputed in one pass: memory

struct Options {
  std::vector<int64_t> contexts{1024, 4096, 16384, 65536}, batches{1, 64};
  int64_t tokens = 640, block = 64;
  double seconds = 2.0;  // at most, for one measurement
  std::string device = "cuda", model = "base", note, out;
};

struct Row {
  std::string side;
  int64_t context = 0, batch = 0;
  std::vector<double> seconds;  // of each step, sorted
  double state_bytes = 0;       // a token
  bool best = false;            // of several ways to the same

  double at(double quantile) const {
    const auto last = static_cast<double>(seconds.size() - 1);
    return seconds[static_cast<size_t>(quantile * last + 0.5)];
  }
  double tokens_per_second() const {
    double sum = 0;
    for (const double s : seconds) sum += s;
    return static_cast<double>(batch) * static_cast<double>(seconds.size()) / sum;
  }
};

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> all;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) all.push_back(std::stoll(word));
  return all;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--contexts")
      o.contexts = numbers(value);
    else if (name == "--batches")
      o.batches = numbers(value);
    else if (name == "--tokens")
      o.tokens = std::stoll(value);
    else if (name == "--block")
      o.block = std::stoll(value);
    else if (name == "--seconds")
      o.seconds = std::stod(value);
    else if (name == "--device")
      o.device = value;
    else if (name == "--model")
      o.model = value;
    else if (name == "--note")
      o.note = value;
    else if (name == "--out")
      o.out = value;
    else
      throw UsageError("bench_generate: unknown option " + name);
  }
  if (argc % 2 == 0) throw UsageError("bench_generate: every option takes a value");
  return o;
}

std::shared_ptr<LanguageModel> make_model(const Options& o, nn::AttentionConfig attention) {
  models::ModelConfig config = models::model_size(o.model);
  attention.block = o.block;
  config.decoder = attention;
  config.vocab = kVocab;
  config.max_length = *std::max_element(o.contexts.begin(), o.contexts.end()) + o.tokens;
  at::manual_seed(1);
  auto model = std::make_shared<LanguageModel>(config);
  model->to(at::Device(o.device));
  model->eval();
  return model;
}

at::Tensor random_ids(int64_t rows, int64_t length) {
  return at::randint(3, kVocab, {rows, length}, at::kLong);
}

// Logits after the last token of ids [B, L], recomputed.
at::Tensor recompute(LanguageModel& model, const at::Tensor& ids, at::ScalarType compute) {
  const at::NoGradGuard no_grad;
  const models::DecoderParts parts = model.decoder_parts();
  nn::Context context;
  context.compute = compute;
  const at::Tensor y = parts.stack->forward(parts.embedding->forward(ids), context);
  return parts.logits(y.select(1, y.size(1) - 1));
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).square().mean().sqrt().item<double>();
}

at::Tensor checked_ids() { return random_ids(2, kCheckedPrompt + kCheckedTokens); }

// Cached bf16 may be twice as far from the float32 pass as the full bf16 pass is. The decoder knows
// the first tokens of ids already.
void check(LanguageModel& model, const std::string& side, const at::Tensor& ids, int64_t known,
           const Step& step) {
  const at::Device device = model.parameters()[0].device();
  double cached = 0, full = 0;
  for (int64_t t = known; t < ids.size(1); ++t) {
    const at::Tensor logits = step(ids.select(1, t));
    // blocks' first tokens, and some others
    if (t < kCheckedPrompt || (t % 64 > 2 && t % 7 != 0)) continue;
    const at::Tensor past = ids.slice(1, 0, t + 1).to(device);
    const at::Tensor exact = recompute(model, past, at::kFloat);
    cached += distance(logits, exact);
    full += distance(recompute(model, past, at::kBFloat16), exact);
  }
  if (cached <= 2.0 * full) return;
  throw Error("bench_generate: " + side + ": cached decoding is " + std::to_string(cached / full) +
              " times as far from float32 as the full pass in bf16; nothing was timed");
}

void check_decoder(const std::shared_ptr<LanguageModel>& model, const std::string& side) {
  const at::Tensor ids = checked_ids();
  Decoder decoder(model, {.batch = 2, .capacity = kCheckedCapacity, .compute = at::kBFloat16});
  decoder.prefill(ids.slice(1, 0, kCheckedPrompt));
  check(*model, side, ids, kCheckedPrompt, [&](const at::Tensor& t) { return decoder.step(t); });
}

class Timer {
 public:
  explicit Timer(const Options& o, size_t least = 8)
      : options_(o), least_(least), begin_(Clock::now()) {}
  bool goes_on() const {
    return static_cast<int64_t>(all_.size()) < options_.tokens &&
           (all_.size() < least_ || since(begin_) < options_.seconds);
  }
  template <class F>
  void time(const F& f) {
    const auto start = Clock::now();
    f();
    all_.push_back(since(start));
  }
  std::vector<double> sorted() {
    std::sort(all_.begin(), all_.end());
    return all_;
  }

 private:
  static double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }
  const Options& options_;
  size_t least_;  // steps, however long they take
  Clock::time_point begin_;
  std::vector<double> all_;
};

at::Tensor chosen(const at::Tensor& logits) { return logits.argmax(-1).cpu(); }

// Every slot holds about `context` tokens, slot s at an offset of its own.
at::Tensor begin(Decoder& decoder, int64_t context) {
  const int64_t batch = decoder.batch(), spread = batch - 1;
  decoder.prefill(random_ids(1, std::max<int64_t>(context - spread, 1)));
  decoder.reorder(at::zeros({batch}, at::kLong));
  const at::Tensor slots = at::arange(batch);
  at::Tensor next = random_ids(1, batch)[0];
  for (int64_t t = 0; t < spread; ++t) {
    chosen(decoder.step(at::where(slots > t, next, -1)));
  }
  return next;
}

// Before any is timed both kinds of step run, are captured and replayed.
int64_t warm_up_steps(const Options& o) { return 4 * o.block; }

// The seconds of each step, sorted, from the tokens `next` on.
std::vector<double> step_seconds(const Options& o, at::Tensor next, const Step& step) {
  const auto token = [&] { next = chosen(step(next)); };
  Timer warm_up(o);
  for (int64_t t = 0; t < warm_up_steps(o) && warm_up.goes_on(); ++t) warm_up.time(token);
  Timer timer(o);
  while (timer.goes_on()) timer.time(token);
  return timer.sorted();
}

// Whole blocks, as their caches have it: memory serves one side after the other.
int64_t capacity_for(const Options& o, int64_t context) {
  return (context + warm_up_steps(o) + o.tokens + o.block) / o.block * o.block;
}

template <class D>
double bytes_a_token(const D& decoder) {
  return static_cast<double>(decoder.state_bytes()) /
         static_cast<double>(decoder.batch() * decoder.capacity());
}

Row cached(const Options& o, const std::shared_ptr<LanguageModel>& model, int64_t context,
           int64_t batch, const std::string& side) {
  Decoder decoder(model,
                  {.batch = batch, .capacity = capacity_for(o, context), .compute = at::kBFloat16});
  const at::Tensor next = begin(decoder, context);
  return {side, context, batch,
          step_seconds(o, next, [&](const at::Tensor& ids) { return decoder.step(ids); }),
          bytes_a_token(decoder)};
}

// Torch's attention on a cache, by one of its backends.
struct Peer {
  std::string side;
  Sdpa backend;
};

std::vector<Peer> all_peers(const Options& o) {
  if (!at::Device(o.device).is_cuda()) return {{"full, SDPA", Sdpa::kAny}};
  return {{"full, SDPA by cuDNN", Sdpa::kCudnn}, {"full, SDPA memory-efficient", Sdpa::kEfficient}};
}

// Calls f, which asks Torch for something that it may refuse; says so if it does.
bool serves(const Peer& peer, const std::function<void()>& f) {
  try {
    f();
    return true;
  } catch (const c10::Error& error) {
    std::cerr << peer.side << " is left out: " << error.what_without_backtrace() << std::endl;
    return false;
  }
}

// Those that take such a query and mask at all.
std::vector<Peer> checked_peers(const Options& o, const std::shared_ptr<LanguageModel>& full) {
  std::vector<Peer> served;
  const at::Tensor ids = checked_ids();
  for (const Peer& peer : all_peers(o)) {
    SdpaDecoder decoder(full, 2, kCheckedCapacity, peer.backend);
    const Step step = [&](const at::Tensor& t) { return decoder.step(t); };
    if (serves(peer, [&] { check(*full, peer.side, ids, 0, step); })) served.push_back(peer);
  }
  return served;
}

Row peer_row(const Options& o, const std::shared_ptr<LanguageModel>& full, int64_t context,
             int64_t batch, const Peer& peer) {
  SdpaDecoder decoder(full, batch, capacity_for(o, context), peer.backend);
  std::vector<int64_t> lengths;
  for (int64_t s = 0; s < batch; ++s) {
    lengths.push_back(std::max<int64_t>(context - batch + 1, 1) + s);  // as in begin()
  }
  decoder.pretend(lengths);
  return {peer.side, context, batch,
          step_seconds(o, random_ids(1, batch)[0],
                       [&](const at::Tensor& ids) { return decoder.step(ids); }),
          bytes_a_token(decoder)};
}

Row recomputed(const Options& o, const std::shared_ptr<LanguageModel>& model, int64_t context,
               int64_t batch) {
  const at::Tensor ids = random_ids(batch, context).to(at::Device(o.device));
  const int64_t rows = std::max<int64_t>(kTokensTogether / context, 1);
  const auto token = [&] {
    std::vector<at::Tensor> logits;
    for (const at::Tensor& some : ids.split(rows)) {
      logits.push_back(recompute(*model, some, at::kBFloat16));
    }
    chosen(at::cat(logits));
  };
  token();
  const nn::CopyScope copies(*model);
  token();
  Options few = o;
  few.tokens = 20;
  Timer timer(few, /*least=*/3);
  while (timer.goes_on()) timer.time(token);
  return {"recomputed", context, batch, timer.sorted(), 0.0};
}

void print(const Row& r, const Options& o, std::ostream* sink) {
  std::printf("| %s%s | %lld | %lld | %.0f | %.3f | %.3f | %.3f | %.0f |\n", r.side.c_str(),
              r.best ? " (best)" : "", static_cast<long long>(r.batch),
              static_cast<long long>(r.context), r.tokens_per_second(), 1e3 * r.at(0.5),
              1e3 * r.at(0.99), 1e3 * r.at(1.0), r.state_bytes);
  std::fflush(stdout);
  if (sink == nullptr) return;
  *sink << "{\"bench\": \"generate\", \"side\": \"" << r.side << "\", \"model\": \"" << o.model
        << "\", \"device\": \"" << o.device << "\", \"note\": \"" << o.note
        << "\", \"best\": " << (r.best ? "true" : "false") << ", \"batch\": " << r.batch
        << ", \"context\": " << r.context << ", \"steps\": " << r.seconds.size()
        << ", \"tokens_per_second\": " << r.tokens_per_second()
        << ", \"median_ms\": " << 1e3 * r.at(0.5) << ", \"p99_ms\": " << 1e3 * r.at(0.99)
        << ", \"longest_ms\": " << 1e3 * r.at(1.0)
        << ", \"state_bytes_per_token\": " << r.state_bytes << "}" << std::endl;
}

// Full attention by everything that serves it, the fastest marked.
std::vector<Row> full_rows(const Options& o, const std::shared_ptr<LanguageModel>& full,
                           const std::vector<Peer>& peers, const Row& own) {
  std::vector<Row> rows{own};
  for (const Peer& peer : peers) {
    serves(peer, [&] { rows.push_back(peer_row(o, full, own.context, own.batch, peer)); });
  }
  const auto faster = [](const Row& a, const Row& b) {
    return a.tokens_per_second() < b.tokens_per_second();
  };
  std::max_element(rows.begin(), rows.end(), faster)->best = true;
  return rows;
}

void run(const Options& o) {
  const auto ours = make_model(o, nn::attention_preset("default", true));
  const auto full = make_model(o, {.kind = "full"});
  const std::string own = at::Device(o.device).is_cuda() ? "full, our kernel" : "full";
  check_decoder(ours, "ours");
  check_decoder(full, own);
  const std::vector<Peer> peers = checked_peers(o, full);
  std::ofstream file;
  if (!o.out.empty()) file.open(o.out);
  std::ostream* sink = o.out.empty() ? nullptr : &file;
  std::printf(
      "%s, %s, bf16, vocabulary %lld %s\n\n| | batch | context | tokens/s | median ms | 99%% ms | "
      "longest ms | state bytes a token |\n|---|---|---|---|---|---|---|---|\n",
      o.model.c_str(), o.device.c_str(), static_cast<long long>(kVocab), o.note.c_str());
  for (const int64_t batch : o.batches) {
    for (const int64_t context : o.contexts) {
      print(cached(o, ours, context, batch, "ours"), o, sink);
      const Row mine = cached(o, full, context, batch, own);
      for (const Row& row : full_rows(o, full, peers, mine)) print(row, o, sink);
      print(recomputed(o, ours, context, batch), o, sink);
    }
  }
}

}  // namespace
}  // namespace sinkhorn

int main(int argc, char** argv) {
  try {
    sinkhorn::run(sinkhorn::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
