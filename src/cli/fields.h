// The table of configuration keys: one Field a key, bound to the variable it sets, with what it may
// hold and what to say about it. Reading, writing, help and shell completion all walk this table.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "train/config.h"

namespace sinkhorn::cli {

// The numbers a key may hold, and how to say so: "at least 1".
struct Range {
  const char* words;
  bool (*holds)(double);
};

struct Field {
  std::string key;  // section.name
  std::variant<std::string*, int64_t*, uint64_t*, double*, bool*> value;
  std::string help;
  std::vector<std::string> words = {};  // what a string may be; empty: anything
  Range range = {"a number", [](double) { return true; }};

  std::string_view section() const { return std::string_view(key).substr(0, key.find('.')); }
  std::string type() const;  // INT, NUMBER, TEXT, or {one,of,these}
  std::string get() const;   // text that set() reads back to the same value
  // Throws UsageError, starting with `name`, for text of the wrong type or out of range.
  void set(const std::string& text, const std::string& name) const;
};
using Fields = std::vector<Field>;

// Words that stand for many keys at once; the keys beside them override what they set.
struct Choices {
  std::string size;            // of the model; "": the defaults of ModelConfig
  std::string encoder_preset;  // of the stack's attention; "": default
  std::string decoder_preset;
};

Fields choice_fields(Choices& choices);
// Every variable of a run that a person sets. What the task fills in (vocab, classes) has no key.
Fields run_fields(train::RunConfig& config);

// Whether a configuration file can hold it.
bool is_writable(std::string_view text);

std::string join(const std::vector<std::string>& words, const std::string& separator);
// {one,of,these}: the type of an option that takes one of a few words.
std::string choice_of(const std::vector<std::string>& words);

}  // namespace sinkhorn::cli
