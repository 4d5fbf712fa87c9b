// The program `sinkhorn`. Errors end here: one line on stderr that says what to do, and an exit
// code of 2 for a command that cannot be meant, 1 for one that failed.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/fields.h"
#include "sinkhorn/error.h"
#include "train/notice.h"

namespace sinkhorn::cli {
namespace {

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* child : app.get_subcommands(nullptr)) names.push_back(child->get_name());
  return names;
}

// The innermost command that the line names.
const CLI::App* named_command(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().back();
  return app;
}

// What to write in place of an option. A key of training may be no mistake but one that this
// command would ignore: then the keys that it heeds are named.
std::string advice(const CLI::App& app, const std::string& word,
                   const std::vector<std::string>& candidates) {
  const std::vector<Key> keys = config_keys();
  const auto is_key = [&](const std::string& option) {
    return std::any_of(keys.begin(), keys.end(),
                       [&](const Key& key) { return option == "--" + key.name; });
  };
  std::vector<std::string> heeded;
  std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(heeded), is_key);
  if (heeded.empty() || !is_key(word)) return suggestion(word, candidates);
  return "; the keys that " + app.get_name() + " takes are " + join(heeded, ", ");
}

[[noreturn]] void refuse_word(const CLI::App& app, const std::string& word) {
  std::vector<std::string> candidates = subcommand_names(app);
  if (word.starts_with("-")) {
    const std::string bare = word.substr(0, word.find('='));
    candidates.clear();
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) candidates.push_back("--" + name);
    }
    throw UsageError("unknown option " + bare + advice(app, bare, candidates));
  }
  const char* what = candidates.empty() ? "unexpected argument " : "unknown command ";
  throw UsageError(what + word + suggestion(word, candidates));
}

[[noreturn]] void refuse_incomplete(const CLI::App& app) {
  throw UsageError("which command? one of " + join(subcommand_names(app), ", ") + "; see --help");
}

// A key whose value was left out would take the next key for it.
void check_values(int argc, char** argv) {
  const std::vector<Key> keys = config_keys();
  const auto is_key = [&](const std::string& word) {
    return std::any_of(keys.begin(), keys.end(),
                       [&](const Key& key) { return word == "--" + key.name; });
  };
  for (int i = 1; i + 1 < argc; ++i) {
    if (is_key(argv[i]) && is_key(argv[i + 1])) {
      throw UsageError(std::string(argv[i]) + ": expected a value, found " + argv[i + 1]);
    }
  }
}

void parse(CLI::App& program, int argc, char** argv) {
  check_values(argc, argv);
  try {
    program.parse(argc, argv);
  } catch (const CLI::Success&) {
    throw;  // --help, --version
  } catch (const CLI::ParseError& error) {
    // An option that does not exist is the likelier cause of whatever else is wrong.
    const std::vector<std::string> rest = program.remaining(true);
    if (!rest.empty()) refuse_word(*named_command(&program), rest.front());
    throw UsageError(error.what());
  }
  const std::vector<std::string> rest = program.remaining(true);
  if (!rest.empty()) refuse_word(*named_command(&program), rest.front());
}

int run(int argc, char** argv) {
  CLI::App program(
      "Sparse Sinkhorn Attention: train, evaluate, inspect and use Sinkhorn Transformers.",
      "sinkhorn");
  program.set_version_flag("--version", "sinkhorn " SINKHORN_VERSION, "Print the version and exit");
  const std::vector<Command> commands = {
      add_train(program),     add_eval(program),       add_inspect(program),
      add_generate(program),  add_classify(program),   add_serve(program),
      add_export(program),    add_reproduce(program),  add_report(program),
      add_info(program),      add_data_check(program), add_tokenizer_train(program),
      add_completion(program)};
  program.allow_extras();
  for (CLI::App* app : program.get_subcommands(nullptr)) {
    app->allow_extras();
    for (CLI::App* child : app->get_subcommands(nullptr)) child->allow_extras();
  }
  try {
    parse(program, argc, argv);
  } catch (const CLI::Success& success) {
    return program.exit(success);
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  refuse_incomplete(*named_command(&program));
}

constexpr const char* kOutOfMemory =
    "out of memory; make the batch, the sequences or the model smaller";

int fail(const std::string& message, int code) {
  std::cerr << "sinkhorn: " << message.substr(0, message.find('\n')) << "\n";
  return code;
}

}  // namespace
}  // namespace sinkhorn::cli

int main(int argc, char** argv) {
  using sinkhorn::cli::fail, sinkhorn::cli::kOutOfMemory;
  sinkhorn::train::send_notices(
      [](const std::string& line) { std::cerr << "sinkhorn: " << line << "\n"; });
  try {
    const int code = sinkhorn::cli::run(argc, argv);
    if (!std::cout.flush()) return fail("standard output cannot be written", 1);
    return code;
  } catch (const sinkhorn::UsageError& error) {
    return fail(error.what(), 2);
  } catch (const std::bad_alloc&) {
    return fail(kOutOfMemory, 1);
  } catch (const std::filesystem::filesystem_error& error) {
    return fail(error.path1().string() + ": " + error.code().message(), 1);
  } catch (const std::exception& error) {
    const std::string message = error.what();
    // Torch has no type of its own for an allocation on the CPU that failed.
    if (message.find("DefaultCPUAllocator") != message.npos) return fail(kOutOfMemory, 1);
    return fail(message, 1);  // Torch's messages go on with a backtrace: the first line only
  }
}
