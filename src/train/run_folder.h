// A run on disk:
//   config.ini         the resolved configuration
//   environment.json   versions, commit, threads, devices; environment-500.json: of the part
//                      from that step on, where that is another
//   result.json        how far it came: finished or not, seconds, speed, memory (of the program)
//   log.jsonl          one JSON object a line: {"step":..,"loss":..}, {"step":..,"eval":{...}}
//   events.out.tfevents.*   the same for TensorBoard
//   task.json          what the task is to the model: its vocabulary, its labels, ...
//   tokenizer.model    where the task has one
//   checkpoints/step-00000500.safetensors   the newest k; best.safetensors; newest.json
// Every file but the logs is replaced whole: written beside, synced, renamed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sinkhorn/models/safetensors.h"

namespace sinkhorn::train {

class RunFolder {
 public:
  // Makes the folder. A folder that already holds a run's checkpoint is an error unless resume is
  // set, or one with other things than a run; resume of a folder without a run is an error too.
  // Nothing in it is written before claim().
  RunFolder(std::filesystem::path root, bool resume);
  ~RunFolder();

  const std::filesystem::path& root() const { return root_; }

  // No other process writes here from now on.
  void claim();
  // Drops what is there of a run that came to no checkpoint; its tokenizer too, if the new one will
  // not write one in its place.
  void begin_anew(bool has_tokenizer);
  void write_text(const std::string& name, const std::string& text);
  // Writes down the environment of the part from this step on, where that is another than before.
  void describe(int64_t step, const std::string& environment);

  // Appends to log.jsonl and the event file. Named figures at a step. The kind "speed" goes to the
  // event file alone: log.jsonl is the same to the bit whenever the same run is run again.
  using Figures = std::vector<std::pair<std::string, double>>;
  void log(const std::string& kind, int64_t step, const Figures& figures);
  void flush();
  // Drops what was logged after a step, and evaluations after step `evaluated`: a resumed run
  // writes them again.
  void rewind_log(int64_t step, int64_t evaluated);

  static constexpr int64_t kAll = INT64_MAX;
  // Saves a checkpoint, then drops all but the newest `keep` (and the best).
  void save(int64_t step, const models::NamedTensors& tensors, const models::Metadata& metadata,
            int64_t keep, bool best);
  // The newest checkpoint that reads back whole, the best where none of the others does; nothing
  // where there is none.
  std::optional<std::filesystem::path> newest() const;
  std::optional<std::filesystem::path> best() const;

 private:
  struct Logs;
  std::filesystem::path root_;
  std::unique_ptr<Logs> logs_;
};

}  // namespace sinkhorn::train
