// `sinkhorn generate`: texts, images, sorted lists and answers from a trained run.
#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/run_options.h"
#include "cli/signals.h"
#include "models/files.h"
#include "report/png.h"
#include "report/read_png.h"
#include "sinkhorn/error.h"
#include "tasks/corpus.h"
#include "tasks/tokenizer.h"
#include "train/generate_run.h"
#include "train/prompt.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSide = 32;      // of an image
constexpr int64_t kGap = 2;        // pixels between images
constexpr uint8_t kUnknown = 128;  // grey of what is not given and was not made
constexpr int64_t kMostAtOnce = 4096;

struct GenerateOptions {
  fs::path run;
  train::GenerateRequest request;
  std::string standard_input;  // "-"
  fs::path prompt_file, image, out;
  int64_t image_index = 0;
  int64_t beams = 0;
  double length_penalty = generate::BeamOptions{}.length_penalty;
  bool stream = false, json = false;
};

// A last line end is the editor's or echo's, not the prompt's, and a byte order mark in front.
std::string only_text(std::string text) {
  text.erase(0, tasks::byte_order_mark(text));
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
  return text;
}

std::string read_prompt_file(const fs::path& path) {
  std::error_code unknown;
  if (fs::is_other(path, unknown)) return models::read_text(path);  // a pipe, standard input
  return std::string(tasks::MappedFile(path).bytes());
}

void read_prompt(GenerateOptions& options) {
  if (!options.standard_input.empty()) {
    if (options.standard_input != "-") {
      throw UsageError("unexpected argument " + options.standard_input +
                       "; a prompt is given by --prompt, --prompt-file, or - for standard input");
    }
    options.request.prompt =
        only_text({std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()});
  } else if (!options.prompt_file.empty()) {
    options.request.prompt = only_text(read_prompt_file(options.prompt_file));
  }
}

// 32 x 32 x 3 values: a PNG, or a record of CIFAR-10's binary files.
std::vector<uint8_t> read_image(const fs::path& path, int64_t index) {
  std::vector<uint8_t> values;
  if (path.extension() == ".bin") {
    int64_t number = 0;
    tasks::read_images({path}, [&](const tasks::Item& item) {
      if (number++ == index) values.assign(item.text.begin(), item.text.end());
    });
    if (values.empty()) {
      throw UsageError("--image-index is " + std::to_string(index) + "; " + path.string() +
                       " holds " + std::to_string(number));
    }
    return values;
  }
  const report::Image image = report::read_png(path, kSide * kSide);
  if (image.width != kSide || image.height != kSide) {
    throw Error(path.string() + ": the picture has " + std::to_string(image.width) + " x " +
                std::to_string(image.height) + " pixels; expected 32 x 32");
  }
  return image.rgb;
}

report::Image picture(const std::vector<uint8_t>& values) {
  report::Image image{kSide, kSide, values};
  image.rgb.resize(kSide * kSide * 3, kUnknown);
  return image;
}

// The image asked about, what was given of it, and every sample; or the samples in a square.
void write_images(const GenerateOptions& options, const train::Generation& made) {
  std::vector<uint8_t> given;
  for (const int32_t id : made.given) given.push_back(static_cast<uint8_t>(id - tasks::kFirstByte));
  std::vector<report::Image> images;
  if (!options.request.image.empty()) {
    images = {picture(options.request.image), picture(given)};
  }
  for (const auto& sample : made.samples) {
    std::vector<uint8_t> values = given;
    for (const int64_t id : sample.ids) {
      values.push_back(static_cast<uint8_t>(id - tasks::kFirstByte));
    }
    images.push_back(picture(values));
  }
  const int64_t count = static_cast<int64_t>(images.size());
  const int64_t square = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(count))));
  report::write_png(options.out,
                    report::grid(images, options.request.image.empty() ? square : count, kGap));
}

void print_json(const train::Generation& made) {
  for (const auto& sample : made.samples) {
    const nlohmann::ordered_json object = {{"prompt", made.prompt},
                                           {"text", sample.text},
                                           {"ids", sample.ids},
                                           {"log_probability", sample.log_probability},
                                           {"stop", sample.ended}};
    std::cout << object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  }
}

void print_text(const train::Generation& made) {
  for (size_t i = 0; i < made.samples.size(); ++i) {
    std::cout << (i > 0 ? "\n" : "") << made.samples[i].text << "\n";
  }
}

void check_stops(const std::vector<std::string>& stops) {
  for (const std::string& stop : stops) {
    if (stop.empty()) throw UsageError("--stop is empty; it must be some text");
    const auto bad = tasks::first_bad_byte(stop);
    if (bad) throw UsageError("--stop is not UTF-8 text from byte " + std::to_string(*bad) + " on");
  }
}

void check_options(const GenerateOptions& options, const train::RunConfig& config) {
  const train::GenerateRequest& request = options.request;
  if (options.beams > 0 && request.samples > options.beams) {
    throw UsageError("--samples is " + std::to_string(request.samples) + " of " +
                     std::to_string(options.beams) + " --beams; it must be at most that");
  }
  if (options.stream && request.samples > 1) {
    throw UsageError("--stream shows one sample as it is made; leave out --samples");
  }
  check_stops(request.stop_texts);
  const bool pixels = config.task.name == "pixels";
  if (pixels && (options.stream || !request.stop_texts.empty())) {
    throw UsageError("--stream and --stop are for text; this model makes images");
  }
  if (!pixels && !options.image.empty()) {
    throw UsageError("--image is for models of the task pixels");
  }
  if (!pixels && !options.out.empty()) {
    throw UsageError("--out is for images; this model's text goes to standard output");
  }
}

// Where the PNG goes; "": there is none. An image takes a while, so that is found out before.
fs::path picture_path(const GenerateOptions& options, const train::RunConfig& config) {
  if (config.task.name != "pixels" || (options.json && options.out.empty())) return {};
  const fs::path path = options.out.empty() ? options.run / "generate.png" : options.out;
  const fs::path folder = path.parent_path();
  if (!folder.empty() && !fs::is_directory(folder)) {
    throw Error(path.string() + ": the picture cannot be written: " + folder.string() +
                " is not a folder");
  }
  return path;
}

int run_generate(GenerateOptions& options, const Overrides& overrides) {
  const train::RunConfig config = read_run_config(options.run, overrides);
  check_options(options, config);
  options.out = picture_path(options, config);
  read_prompt(options);
  train::GenerateRequest& request = options.request;
  if (!options.image.empty()) request.image = read_image(options.image, options.image_index);
  if (options.beams > 0) request.beam = {options.beams, options.length_penalty};
  request.interrupted = [] { return stop_signal != 0; };
  catch_signals();
  const train::OnText show = [](int64_t, const std::string& piece) {
    std::cout << piece << std::flush;
  };
  const train::Generation made =
      train::generate_run(config, request, options.stream ? show : train::OnText());
  const bool draws = !options.out.empty();
  if (draws) write_images(options, made);
  if (options.json) {
    print_json(made);
  } else if (draws) {
    std::cout << options.out.string() << "\n";
  } else {
    options.stream ? void(std::cout << "\n") : print_text(made);
  }
  return stop_signal != 0 ? 128 + stop_signal : 0;
}

void add_prompt_options(CLI::App& app, GenerateOptions& options) {
  CLI::Option* prompt = app.add_option("--prompt", options.request.prompt,
                                       "text, or numbers, to go on from; none: begin anew");
  CLI::Option* file = app.add_option("--prompt-file", options.prompt_file,
                                     "the prompt in a file, in place of --prompt");
  CLI::Option* input =
      app.add_option("STDIN", options.standard_input, "-: prompt on standard input");
  CLI::Option* image = app.add_option("--image", options.image,
                                      "pixels: complete the upper half of a 32 x 32 PNG, or of an "
                                      "image of CIFAR-10's .bin files; none: make whole ones");
  prompt->type_name("TEXT")->excludes(file)->excludes(input);
  file->type_name("FILE")->excludes(input);
  input->type_name("-");
  image->type_name("FILE")->excludes(prompt)->excludes(file)->excludes(input);
  app.add_option("--image-index", options.image_index, "which image of a .bin file")
      ->type_name("INT")
      ->check(at_least(0))
      ->capture_default_str()
      ->needs(image);
}

void add_length_options(CLI::App& app, GenerateOptions& options) {
  train::GenerateRequest& request = options.request;
  app.add_option("--max-tokens", request.max_tokens,
                 "tokens to make at most; default: 256 for texts")
      ->type_name("INT")
      ->check(at_least(1));
  app.add_option("--stop", request.stop_texts,
                 "end before this text; may be given again; none: where the model ends")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  app.add_flag("--ignore-end", request.ignore_end, "go on where the model ends a text");
  app.add_option("--samples", request.samples, "how many, made together; of beams: the best")
      ->type_name("INT")
      ->check(CLI::Range(int64_t{1}, kMostAtOnce))
      ->capture_default_str();
}

void add_choice_options(CLI::App& app, GenerateOptions& options) {
  train::GenerateRequest& request = options.request;
  generate::SamplingOptions& sampling = request.sampling;
  const std::vector<CLI::Option*> draws = {
      app.add_option("--temperature", request.temperature,
                     "0: greedy; default: 1, for lists and answers 0")
          ->type_name("NUMBER"),
      app.add_option("--top-k", sampling.top_k, "only the k likeliest tokens; 0: all")
          ->type_name("INT")
          ->check(at_least(0))
          ->capture_default_str(),
      app.add_option("--top-p", sampling.top_p, "only the likeliest tokens that together reach p")
          ->type_name("NUMBER")
          ->capture_default_str(),
      app.add_option("--repetition-penalty", sampling.repetition_penalty,
                     "makes tokens less likely that are there already; 1: none")
          ->type_name("NUMBER")
          ->capture_default_str(),
      app.add_option("--seed", sampling.seed, "same seed, same text")
          ->type_name("INT")
          ->check(at_least(0))
          ->capture_default_str(),
      app.add_flag("--stream", options.stream, "print text as it is made")};
  CLI::Option* beams =
      app.add_option("--beams", options.beams, "beam search of this width, in place of sampling")
          ->type_name("INT")
          ->check(CLI::Range(int64_t{1}, kMostAtOnce));
  for (CLI::Option* option : draws) beams->excludes(option);
  app.add_option("--length-penalty", options.length_penalty,
                 "beams: a larger one favours longer texts")
      ->type_name("NUMBER")
      ->capture_default_str()
      ->needs(beams);
  app.add_flag("--json", options.json, "print a JSON object a sample, one a line")
      ->excludes(draws.back());
}

}  // namespace

Command add_generate(CLI::App& program) {
  CLI::App* app = program.add_subcommand(
      "generate", "Continue a text, complete or draw images, sort numbers, with a trained run");
  auto options = std::make_shared<GenerateOptions>();
  add_run_argument(*app, options->run);
  add_prompt_options(*app, *options);
  add_length_options(*app, *options);
  add_choice_options(*app, *options);
  app->add_option("--out", options->out, "pixels: the PNG; default RUN/generate.png")
      ->type_name("FILE");
  add_checkpoint_option(*app, options->request.checkpoint);
  app->footer(
      "Examples:\n"
      "  sinkhorn generate runs/book --prompt \"It was a dark\" --stream\n"
      "  sinkhorn generate runs/book --prompt-file begun.txt --samples 4 --top-p 0.9 --seed 7 "
      "--json\n"
      "  sinkhorn generate runs/sort --prompt \"5 3 1\"\n"
      "  sinkhorn generate runs/pixels --image begun.png --samples 3 --out completed.png");
  auto overrides = add_decoding_key_options(*app);
  add_device_options(*app, overrides);
  return {app, [options, overrides] { return run_generate(*options, *overrides); }};
}

}  // namespace sinkhorn::cli
