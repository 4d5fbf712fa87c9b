// `sinkhorn reproduce`: a table or figure of the paper by name.
#include "reproduce/reproduce.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "cli/commands.h"
#include "cli/fields.h"
#include "reproduce/children.h"
#include "reproduce/print.h"
#include "sinkhorn/error.h"
#include "train/attention_memory.h"
#include "train/environment.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

std::atomic<int> stop_signal{0};

// A second signal of the same kind ends the program at once; its children save themselves.
void on_signal(int signal) {
  stop_signal = signal;
  std::signal(signal, SIG_DFL);
}

// Lines that renew themselves on a terminal, plain lines elsewhere. With JSON all but that goes to
// stderr.
class Terminal final : public reproduce::Screen {
 public:
  explicit Terminal(bool json) : out_(json ? stderr : stdout) {
    renews_ = isatty(fileno(out_)) == 1;
  }
  ~Terminal() override { clear(); }

  void line(const std::string& text) override {
    clear();
    std::fprintf(out_, "%s\n", text.c_str());
    std::fflush(out_);
  }
  void running(const std::vector<std::string>& lines) override {
    if (!renews_ || (lines == last_ && shown_ == lines.size())) return;
    clear();
    for (const std::string& text : lines) std::fprintf(out_, "%.*s\n", columns(), text.c_str());
    shown_ = lines.size();
    last_ = lines;
    std::fflush(out_);
  }
  void table(const reproduce::Results& results) override {
    line("\n" + reproduce::print_table(results));
  }

 private:
  void clear() {
    for (; shown_ > 0; --shown_) std::fputs("\033[A\033[2K", out_);
  }
  // A line that wraps could not be taken back.
  int columns() const {
    winsize size{};
    return ioctl(fileno(out_), TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1 : 79;
  }

  FILE* out_;
  bool renews_ = false;
  std::vector<std::string> last_;
  size_t shown_ = 0;  // lines to be renewed
};

// configs/ here, or that of the tree the program was built in.
fs::path configs_folder(const std::string& given) {
  if (!given.empty()) return given;
  const fs::path here = "configs";
  if (!reproduce::table_names(here).empty()) return here;
  return reproduce::own_program().parent_path().parent_path().parent_path() / "configs";
}

int run_reproduce(const reproduce::Options& options, bool json) {
  const reproduce::ConfigLanguage language = {
      [](const std::vector<fs::path>& files, const Overrides& keys) {
        return read_config(files, keys);
      },
      write_config};
  const reproduce::Table table = reproduce::find_table(options.configs, options.name);
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  Terminal terminal(json);
  const reproduce::Outcome outcome =
      reproduce::reproduce(table, options, language, terminal, stop_signal);
  if (json) {
    std::cout << reproduce::to_json(outcome.results);
  } else {
    terminal.table(outcome.results);
  }
  for (const std::string& failure : outcome.failures) terminal.line("failed: " + failure);
  if (outcome.stopped) {
    terminal.line("stopped; runs in progress are saved, and the same command goes on from there");
    return 128 + stop_signal;
  }
  return outcome.failures.empty() ? 0 : 1;
}

int run_probe(const std::string& text, const std::string& device) {
  train::AttentionProbe probe;
  std::istringstream words(text);
  std::string length, block;
  std::getline(words, probe.kind, ':');
  std::getline(words, length, ':');
  std::getline(words, block);
  const auto count = [](const std::string& word, int64_t& number) {
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, number);
    return error == std::errc() && stop == end && number >= 1;
  };
  if (!count(length, probe.length) || !count(block, probe.block)) {
    throw UsageError("--probe: \"" + text + "\" is not KIND:LENGTH:BLOCK, numbers at least 1");
  }
  probe.device = device;
  std::cout << train::attention_memory(probe) << "\n";
  return 0;
}

void check_device(const std::string& device) {
  try {
    train::check_device(device);
  } catch (const UsageError& error) {
    throw UsageError(std::string("--") + error.what());  // device 'x'; expected ...
  } catch (const Error& error) {                         // one that is not here
    throw Error(std::string("--") + error.what());
  }
}

void check_word(const std::string& option, const std::string& word,
                const std::vector<std::string>& words) {
  if (std::find(words.begin(), words.end(), word) != words.end()) return;
  throw UsageError(option + ": \"" + word + "\" is not one of " + join(words, ", "));
}

}  // namespace

Command add_reproduce(CLI::App& program) {
  const std::vector<std::string> presets = {"default", "paper"};
  CLI::App* app = program.add_subcommand(
      "reproduce", "Train and evaluate a table or figure of the paper, beside its numbers");
  struct All {
    reproduce::Options options;
    std::string configs, probe;
    bool json = false;
  };
  auto all = std::make_shared<All>();
  reproduce::Options& o = all->options;
  app->add_option("NAME", o.name,
                  "table1 to table8, fig-temperature, fig-iterations, memory, study, study-encoder")
      ->required()
      ->type_name("NAME");
  app->add_option("--scale", o.scale,
                  "smoke: two minutes on two cores, proves the path; small: minutes on a large "
                  "GPU, shows orderings; full: the paper's own setting")
      ->type_name(choice_of(reproduce::kScales))
      ->capture_default_str();
  app->add_option("--rows", o.rows, "rows to train, by the names of their files; all if not given")
      ->type_name("ROW,...")
      ->delimiter(',');
  app->add_option(
         "--variants", o.variants,
         "of a table whose columns are trainings of their own: those to train; default: all")
      ->type_name("NAME,...")
      ->delimiter(',');
  app->add_option("--data", o.data,
                  "folder that holds the publishers' folders; required where a table reads some")
      ->type_name("DIR");
  app->add_option("--out", o.out, "folder of runs and results files")
      ->type_name("DIR")
      ->capture_default_str();
  app->add_option("--seeds", o.seeds, "runs a row, with seeds 1 to this; their mean is shown")
      ->type_name("INT")
      ->check(CLI::Range(int64_t{1}, int64_t{1000}))
      ->capture_default_str();
  app->add_flag("--tune", o.tune,
                "pick temperature and iterations by short runs and held-out data first");
  app->add_option("--preset", o.preset, "paper: add the rows of the paper's literal formulas")
      ->type_name(choice_of(presets))
      ->capture_default_str();
  app->add_option("--jobs", o.jobs,
                  "runs at a time; 0: what a GPU's free memory and the cores have room for")
      ->type_name("INT")
      ->check(CLI::Range(int64_t{0}, int64_t{1000}))
      ->capture_default_str();
  app->add_option("--device", o.device, "auto, cpu, cuda or cuda:N")
      ->type_name("TEXT")
      ->capture_default_str();
  app->add_option("--configs", all->configs, "folder of tables; configs, if not given")
      ->type_name("DIR");
  app->add_flag("--json", all->json, "print the results file; all else goes to stderr");
  // How `reproduce memory` starts itself for one measurement.
  app->add_option("--probe", all->probe, "KIND:LENGTH:BLOCK")->group("");
  app->footer(
      "Runs lie in OUT/NAME/SCALE, results in OUT/NAME.SCALE.json. What is done is not run again;\n"
      "what was interrupted is resumed by the same command.");
  return {app, [all, presets] {
            check_device(all->options.device);
            if (!all->probe.empty()) return run_probe(all->probe, all->options.device);
            check_word("--scale", all->options.scale, reproduce::kScales);
            check_word("--preset", all->options.preset, presets);
            all->options.configs = configs_folder(all->configs);
            return run_reproduce(all->options, all->json);
          }};
}

}  // namespace sinkhorn::cli
