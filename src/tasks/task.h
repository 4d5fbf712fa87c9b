// What to learn: a task turns a publisher's files into batches of numbers and names its metric.
// Nothing here knows Torch: batches are plain arrays, the trainer makes tensors of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sinkhorn::tasks {

struct TaskConfig {
  std::string name = "sort";    // one of task_names()
  std::string data;             // the publisher's folder (or a file); unused where it is generated
  std::string cache;            // for token files and vocabularies; "": $XDG_CACHE_HOME/sinkhorn
  std::string tokens = "auto";  // bytes, pieces; auto: what the task's table in the paper uses
  std::string tokenizer;        // a SentencePiece model to use; "": train one on the training data
  int64_t vocab = 0;            // pieces to train; 0: the task's own (lm, text 32000, others 8000)
  int64_t length = 0;           // longest sequence in tokens; 0: the task's own
  // train: where validation and test would be the same files, validation is held out of training,
  // so that what is chosen by it can be tested by the other. "": they are the same, and noted.
  std::string valid;
  // text: joined: the files of a folder are one text, in the order of their names, so that what one
  // says can be read in the next. "": each is a text of its own.
  std::string files;
  // Of a model that is there already; no keys of a configuration. whole: all that the data holds is
  // the test split, and the others are the same (text, classify). labels: the classes it learned.
  bool whole = false;
  std::vector<std::string> labels = {};
  int64_t sort_symbols = 512;
  int64_t sort_train_max = 256;  // longest list in training; tests go to sort_test_max
  int64_t sort_test_max = 512;
  int64_t sort_train_size = 100000;
  int64_t sort_test_size = 1000;
  int64_t recall_pairs = 16;    // key-value pairs of a sequence
  int64_t recall_queries = 0;   // keys asked; 0: all
  int64_t recall_distance = 0;  // tokens between any pair and any query at least; 0: half of length
  int64_t recall_keys = 64;     // different keys, values and fillers
  int64_t recall_values = 64;
  int64_t recall_fillers = 16;
  int64_t recall_test_size = 1000;
};

enum class ModelKind { kLanguageModel, kSeq2Seq, kClassifier };

struct TaskInfo {
  ModelKind model;
  int64_t vocab;        // ids are 0 .. vocab - 1; 0 pads, 1 begins (decoder input), 2 ends
  int64_t classes = 0;  // classifiers
  int64_t max_length;   // longest sequence any split yields, the end token included
  // exact_match, accuracy (of rows, or of answers), perplexity (per word), bits_per_byte (text),
  // bits_per_character (lm as bytes, the name of the paper's Table 4), bits_per_dim
  std::string metric;
  bool higher_is_better;
  std::vector<std::string> labels;  // names of the classes
  std::string data_note;            // "" or what the data is: "generated", "IMDb, 25000 train ..."
  int64_t data_tokens = 0;          // of all splits; 0 where they are generated
};

// One batch, row-major. A row's real tokens come first; the rest is 0.
struct Batch {
  int64_t rows = 0;
  int64_t length = 0;            // of input (and target, for language models)
  std::vector<int32_t> input;    // [rows, length]: what the encoder, or a language model, reads
  std::vector<int32_t> lengths;  // [rows]: real tokens of input
  // Language models: the next token at every position, 0 where it does not count. Seq2Seq: what the
  // decoder must say, end token included; the decoder reads it shifted right behind token 1.
  // Classifiers: empty.
  int64_t target_length = 0;
  std::vector<int32_t> target;          // [rows, target_length]
  std::vector<int32_t> target_lengths;  // [rows]
  std::vector<int32_t> labels;          // [rows], classifiers
  int64_t tokens = 0;  // real target tokens (classifiers, recall: real input tokens)
  int64_t units = 0;   // what the metric divides by: words for lm, bytes, dimensions, answers, rows
};

struct BatchConfig {
  int64_t rows = 0;    // sequences a batch; or
  int64_t tokens = 0;  // real or padded tokens a batch at most, rows of like length together
  uint64_t seed = 1;
  int64_t rank = 0;
  int64_t world = 1;
};

// A deterministic stream: what it yields depends on the configuration and the position alone.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // False at the end of a split; training sources never end.
  virtual bool next(Batch& batch) = 0;
  // Where the stream stands, as JSON, and back: what follows is the same to the bit.
  virtual std::string position() const = 0;
  virtual void seek(std::string_view position) = 0;
};

class Task {
 public:
  virtual ~Task() = default;
  virtual const TaskInfo& info() const = 0;
  virtual std::unique_ptr<BatchSource> train(const BatchConfig& config) = 0;
  // split: "valid" or "test"; every example (token) once. Classifiers and sort go from short to
  // long.
  virtual std::unique_ptr<BatchSource> eval(std::string_view split, const BatchConfig& config) = 0;
  // Ids as a person reads them (symbols and pixels: numbers; pairs: separated by a tab), and back:
  // what a model reads of an input, for sort and classifiers with its end token.
  virtual std::string text(const std::vector<int32_t>& ids) const = 0;
  virtual std::vector<int32_t> ids(std::string_view text) const = 0;
  // The tokenizer's files ("" for none), copied into a run folder so that the run stands alone.
  virtual std::string tokenizer_path() const = 0;
};

// sort, recall, lm, text, pixels, sentiment, nli, classify.
const std::vector<std::string>& task_names();
bool is_generated(const std::string& task);  // reads no data
bool has_encoder(const std::string& task);   // its model does: a Seq2Seq or a classifier
bool has_decoder(const std::string& task);

// What a sequence to be said begins behind, and whether an end token closes it. Packed texts begin
// behind the end of another: token 1 stands before the first of all alone.
struct Framing {
  int32_t begin;
  bool ends;
};
Framing framing(const std::string& task);

// Opens the data, tokenising it where the cache has it not; throws Error with one line where it is
// missing, malformed or empty.
std::unique_ptr<Task> make_task(const TaskConfig& config);

// `sinkhorn data check`: what is there, what is missing, and where the publisher offers it.
struct DataReport {
  struct SplitFound {
    std::string name;                 // train, valid, test
    int64_t files = 0;                // none: held out of training
    std::optional<int64_t> items;     // none: not read to the end, or a running text
    std::optional<int64_t> bytes;     // of a running text
    std::optional<int64_t> expected;  // items as published (training with what is held out of it)
    bool subset = false;              // there are not as many as expected
    std::vector<std::pair<std::string, int64_t>> labels;  // items of each class
  };

  bool complete = false;  // every split can be read; the lines and the note say what is a subset
  std::vector<std::string> lines = {};  // all of it, for a person
  std::string name = "", page = "";     // of the data set, where it is known which; its publisher's
  std::string note = "";                // what is a subset or stands in for what
  std::string error = "";               // why it is not complete
  std::vector<SplitFound> splits = {};  // none where they are generated
};
DataReport check_data(const TaskConfig& config);

}  // namespace sinkhorn::tasks
