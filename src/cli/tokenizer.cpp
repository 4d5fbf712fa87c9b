#include "tasks/tokenizer.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/commands.h"
#include "cli/run_options.h"

namespace sinkhorn::cli {

Command add_tokenizer_train(CLI::App& program) {
  struct Options {
    std::vector<std::string> files;
    std::string out;
    int64_t vocab = 32000;
  };
  CLI::App* tokenizer = program.add_subcommand("tokenizer", "Make a tokenizer");
  CLI::App* app = tokenizer->add_subcommand("train", "Train SentencePiece on text files");
  auto options = std::make_shared<Options>();
  app->add_option("FILES", options->files, "UTF-8 text files")->required()->type_name("FILE");
  app->add_option("--out", options->out, "the model to write; give it to task.tokenizer")
      ->required()
      ->type_name("FILE");
  app->add_option("--vocab", options->vocab, "pieces at most; a small text yields fewer")
      ->type_name("INT")
      ->check(at_least(1))
      ->capture_default_str();
  return {app, [options] {
            tasks::Corpus corpus{};
            corpus.name = options->files.front();
            if (options->files.size() > 1) corpus.name += " and others";
            corpus.format = tasks::read_text;
            for (const std::string& file : options->files) corpus.sources[0].push_back({file});
            tasks::train_pieces(corpus, options->vocab, options->out);
            std::cout << options->out << ": " << tasks::load_pieces(options->out)->size()
                      << " pieces\n";
            return 0;
          }};
}

}  // namespace sinkhorn::cli
