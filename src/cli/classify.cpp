// `sinkhorn classify`: a trained classifier labels new texts.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/run_options.h"
#include "sinkhorn/error.h"
#include "tasks/files.h"
#include "train/classify_run.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWhereTexts = "texts are given by --text, --file, or - for standard input";

struct ClassifyOptions {
  fs::path run, file;
  std::optional<std::string> text;
  std::string standard_input;  // "-"
  std::string checkpoint = "newest";
  int64_t batch = 32;
  bool json = false;
};

// Why a text cannot be labelled; "": it can.
std::string fault_of(std::string_view text, bool pairs) {
  if (tasks::blank(text)) return "is empty; it must be some text";
  const size_t tab = std::min(text.find('\t'), text.size());
  const std::string_view first = text.substr(0, tab), rest = text.substr(tab);
  const bool two = std::count(rest.begin(), rest.end(), '\t') == 1 && !tasks::blank(first) &&
                   !tasks::blank(rest);
  return two || !pairs ? "" : "is no pair; it must be two sentences, separated by a tab";
}

void check_options(const ClassifyOptions& options, bool pairs) {
  const std::string& word = options.standard_input;
  if (!word.empty() && word != "-") {
    throw UsageError("unexpected argument " + word + "; " + kWhereTexts);
  }
  if (!options.text.has_value() && options.file.empty() && word.empty()) {
    throw UsageError(std::string("no text to label; ") + kWhereTexts);
  }
  const std::string fault = options.text.has_value() ? fault_of(*options.text, pairs) : "";
  if (!fault.empty()) throw UsageError("--text " + fault);
}

// Labels a batch of texts at a time and prints them in their order.
class Labeller {
 public:
  Labeller(const ClassifyOptions& options, const train::RunConfig& config)
      : options_(options), classifier_(config, options.checkpoint) {}

  void add(std::string_view text, const std::string& name) {
    waiting_.push_back({std::string(text), name});
    if (static_cast<int64_t>(waiting_.size()) == options_.batch) finish();
  }

  void finish() {
    if (waiting_.empty()) return;
    const std::vector<train::Verdict> verdicts = classifier_.classify(waiting_);
    for (size_t i = 0; i < verdicts.size(); ++i) {
      options_.json ? print_json(waiting_[i].text, verdicts[i]) : print_line(verdicts[i]);
    }
    waiting_.clear();
    if (!std::cout.flush()) throw Error("standard output cannot be written");
  }

 private:
  void print_line(const train::Verdict& verdict) const {
    char probability[16];
    std::snprintf(probability, sizeof probability, "%.4f", verdict.probabilities[verdict.best]);
    std::cout << classifier_.labels()[verdict.best] << "\t" << probability << "\n";
  }

  void print_json(const std::string& text, const train::Verdict& verdict) const {
    nlohmann::ordered_json object = {{"text", text},
                                     {"label", classifier_.labels()[verdict.best]},
                                     {"probability", verdict.probabilities[verdict.best]}};
    for (size_t i = 0; i < verdict.probabilities.size(); ++i) {
      object["probabilities"][classifier_.labels()[i]] = verdict.probabilities[i];
    }
    std::cout << object.dump() << "\n";
  }

  const ClassifyOptions& options_;
  train::TextClassifier classifier_;
  std::vector<train::NamedText> waiting_;
};

void label_lines(const ClassifyOptions& options, bool pairs, Labeller& labeller) {
  const bool piped = !options.standard_input.empty() || options.file == "-";
  const fs::path source = piped ? "standard input" : options.file;
  const tasks::LineSink add = [&](std::string_view line, int64_t number) {
    const std::string fault = fault_of(line, pairs);
    if (!fault.empty()) tasks::fail(source, number, "the text " + fault);
    labeller.add(line, source.string() + ":" + std::to_string(number));
  };
  std::error_code unknown;
  if (piped) return tasks::each_line(std::cin, source, add);
  if (!fs::is_other(source, unknown)) return tasks::each_line(source, add);
  std::ifstream pipe(source);
  if (!pipe.is_open()) tasks::fail(source, 0, "cannot be opened");
  tasks::each_line(pipe, source, add);
}

int run_classify(const ClassifyOptions& options, const Overrides& overrides) {
  const train::RunConfig config = read_run_config(options.run, overrides);
  const bool pairs = config.task.name == "nli";
  check_options(options, pairs);
  Labeller labeller(options, config);
  options.text.has_value() ? labeller.add(*options.text, "--text")
                           : label_lines(options, pairs, labeller);
  labeller.finish();
  return 0;
}

void add_text_options(CLI::App& app, ClassifyOptions& options) {
  CLI::Option* text = app.add_option("--text", options.text,
                                     "a text; nli: two, separated by a tab; in place of --file")
                          ->type_name("TEXT");
  CLI::Option* file =
      app.add_option("--file", options.file, "a file with a text a line, in place of --text")
          ->type_name("FILE");
  app.add_option("STDIN", options.standard_input, "-: a text a line on standard input")
      ->type_name("-")
      ->excludes(text)
      ->excludes(file);
  text->excludes(file);
}

}  // namespace

Command add_classify(CLI::App& program) {
  CLI::App* app = program.add_subcommand("classify", "Label texts with a trained classifier");
  auto options = std::make_shared<ClassifyOptions>();
  add_run_argument(*app, options->run);
  add_text_options(*app, *options);
  app->add_option("--batch", options->batch, "texts read, and then labelled, at a time")
      ->type_name("INT")
      ->check(at_least(1))
      ->capture_default_str();
  add_checkpoint_option(*app, options->checkpoint);
  app->add_flag("--json", options->json, "print a JSON object a text, one a line");
  app->footer(
      "Examples:\n"
      "  sinkhorn classify runs/reviews --text \"I would see it again\"\n"
      "  sinkhorn classify runs/reviews --file new.txt --json\n"
      "  sinkhorn classify runs/nli --text $'A man sleeps.\\tHe is awake.'\n"
      "  tail -f new.txt | sinkhorn classify runs/reviews - --batch 1");
  auto overrides = add_decoding_key_options(*app);
  add_device_options(*app, overrides);
  return {app, [options, overrides] { return run_classify(*options, *overrides); }};
}

}  // namespace sinkhorn::cli
