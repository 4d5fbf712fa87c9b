#include "tasks/dataset.h"

#include "sinkhorn/error.h"

namespace sinkhorn::tasks {

Split eval_split(std::string_view name) {
  if (name == "valid") return Split::kValid;
  if (name == "test") return Split::kTest;
  throw UsageError("split '" + std::string(name) + "'; expected valid or test");
}

void check_count(const std::string& key, int64_t value, int64_t most) {
  if (value < 1 || value > most) {
    throw UsageError("task." + key + ": " + std::to_string(value) + "; expected 1 to " +
                     std::to_string(most));
  }
}

const std::shared_ptr<const TokenStore>& Dataset::split(std::string_view name) const {
  return splits[static_cast<size_t>(eval_split(name))];
}

std::string Dataset::note() const {
  // How a running text is cut into items is nobody's business: it is told in tokens.
  const bool running = corpus.format == read_text;
  std::string text = corpus.name + ":";
  SplitCounts items{};
  for (size_t i = corpus.whole ? 2 : 0; i < 3; ++i) {
    items[i] = splits[i]->size();
    const int64_t count = running ? splits[i]->tokens() : items[i];
    text += (text.ends_with(':') ? " " : ", ") + std::to_string(count);
    if (!corpus.whole) text += std::string(" ") + kSplitNames[i];
    if (i == 1 && corpus.held_out) text += " (held out of training)";
  }
  text += running                           ? " tokens"
          : corpus.format == read_sentences ? " sentences"
          : corpus.format == read_images    ? " images"
                                            : " examples";
  add_note(text, caveats(corpus, items));
  return text;
}

int64_t Dataset::tokens() const {
  int64_t all = 0;
  for (const auto& split : splits) all += split->tokens();
  return all;
}

bool reads_bytes(const TaskConfig& config) {
  if (config.name == "pixels") return true;
  if (config.tokens == "auto") return config.tokenizer.empty() && config.name == "text";
  if (config.tokens != "bytes" && config.tokens != "pieces") {
    throw UsageError("task.tokens: '" + config.tokens + "'; expected auto, bytes or pieces");
  }
  if (config.tokens == "bytes" && !config.tokenizer.empty()) {
    throw UsageError("task.tokenizer: " + config.tokenizer +
                     " with task.tokens bytes; expected pieces");
  }
  return config.tokens == "bytes";
}

std::shared_ptr<const Tokenizer> open_tokenizer(const TaskConfig& config, const Corpus& corpus,
                                                bool bytes, int64_t default_vocab) {
  if (bytes) return make_byte_tokenizer();
  if (!config.tokenizer.empty()) return load_pieces(config.tokenizer);
  const int64_t vocab = config.vocab > 0 ? config.vocab : default_vocab;
  Key key;
  corpus.add_to(key.add(kPiecesVersion).add(vocab), Split::kTrain);
  const Path model = cache_folder(config.cache) / ("pieces-" + key.hex() + ".model");
  try {
    return load_pieces(model);
  } catch (const Error&) {  // not there yet, or damaged
    remove_leftovers(model.parent_path(), "pieces-");
    train_pieces(corpus, vocab, model);
  }
  return load_pieces(model);
}

}  // namespace sinkhorn::tasks
