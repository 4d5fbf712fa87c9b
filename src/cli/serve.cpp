// `sinkhorn serve`: a trained language model behind a local web page and an OpenAI-style interface.
#include "serve/serve.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/commands.h"
#include "cli/run_options.h"
#include "cli/signals.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostSlots = 1024, kMostWaiting = 1024;  // a thread each

struct ServeCommand {
  fs::path run;
  serve::ServeOptions options;
};

int run_serve(ServeCommand& command, const Overrides& overrides) {
  serve::ServeOptions& options = command.options;
  const train::RunConfig config = read_run_config(command.run, overrides);
  options.model = fs::weakly_canonical(command.run).filename().string();
  catch_signals();
  serve::serve(
      config, options,
      [&](const std::string& address) {
        if (!serve::is_loopback(options.host)) {
          std::cerr << "sinkhorn: whoever can reach " << options.host
                    << " can use this model: there is no password\n";
        }
        std::cout << address << std::endl;
      },
      [] { return stop_signal != 0; });
  return stop_signal != 0 ? 128 + stop_signal : 0;
}

void add_address_options(CLI::App& app, serve::ServeOptions& options) {
  app.add_option("--host", options.host, "address to listen at; 0.0.0.0: every one of this machine")
      ->type_name("TEXT")
      ->capture_default_str();
  app.add_option("--port", options.port, "port to listen at; 0: any free one")
      ->type_name("INT")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
}

void add_limit_options(CLI::App& app, serve::ServeOptions& options) {
  const auto count = [&](const char* name, int64_t& value, const char* help,
                         const CLI::Validator& check) {
    app.add_option(name, value, help)->type_name("INT")->check(check)->capture_default_str();
  };
  count("--slots", options.slots, "texts decoded together", CLI::Range(int64_t{1}, kMostSlots));
  count("--queue", options.queue,
        "requests that wait for a slot, for one text or more; others are refused",
        CLI::Range(int64_t{1}, kMostWaiting));
  count("--max-tokens-limit", options.max_tokens_limit, "most tokens that a request may ask for",
        at_least(1));
  count("--max-request-bytes", options.max_request_bytes, "longest request", at_least(1));
  app.add_option("--timeout", options.timeout, "seconds from a request to its last token")
      ->type_name("NUMBER")
      ->check(is_number())
      ->check(CLI::Range(1e-3, 1e9))
      ->capture_default_str();
}

}  // namespace

Command add_serve(CLI::App& program) {
  CLI::App* app = program.add_subcommand(
      "serve", "Show a trained language model on a local web page, and answer programs");
  auto command = std::make_shared<ServeCommand>();
  add_run_argument(*app, command->run);
  add_address_options(*app, command->options);
  add_limit_options(*app, command->options);
  add_checkpoint_option(*app, command->options.checkpoint);
  app->footer(
      "Examples:\n"
      "  sinkhorn serve runs/book        # prints the address of its page; Ctrl-C ends it\n"
      "  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\\n"
      "    -d '{\"prompt\": \"It was a dark\", \"max_tokens\": 50}'");
  auto overrides = add_decoding_key_options(*app);
  add_device_options(*app, overrides);
  return {app, [command, overrides] { return run_serve(*command, *overrides); }};
}

}  // namespace sinkhorn::cli
