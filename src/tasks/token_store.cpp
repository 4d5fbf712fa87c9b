#include "tasks/token_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <future>
#include <optional>
#include <thread>

#include "sinkhorn/error.h"

namespace sinkhorn::tasks {
namespace fs = std::filesystem;
namespace {

struct Header {
  char magic[8] = {'s', 'n', 'k', 't', 'o', 'k', '0', '1'};
  uint64_t checksum = 0;  // of all that follows the header
  uint64_t items = 0;
  uint64_t tokens = 0;
  uint64_t width = 2;  // bytes a token
};

uint64_t padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

uint64_t checksum(std::string_view bytes) {
  uint64_t sum = bytes.size();
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    sum = (std::rotl(sum, 5) ^ word) * 0x9e3779b97f4a7c15u;
  }
  return sum;
}

Header read_header(const Path& path, std::string_view bytes) {
  Header header;
  const Header expected;
  if (bytes.size() < sizeof header) fail(path, 0, "is cut short; expected a token file");
  std::memcpy(&header, bytes.data(), sizeof header);
  const bool known = std::memcmp(header.magic, expected.magic, sizeof header.magic) == 0;
  const uint64_t size = bytes.size();
  const bool sane = known && (header.width == 2 || header.width == 4) && header.tokens < size &&
                    header.items < size &&
                    sizeof header + padded(header.tokens * header.width) +
                            header.items * sizeof(TokenStore::Entry) ==
                        size;
  if (!sane || checksum(bytes.substr(sizeof header)) != header.checksum) {
    fail(path, 0, "is damaged; expected a token file of this version");
  }
  return header;
}

struct Pending {
  std::string text, pair;
  Path file;
  int64_t line;
  TokenStore::Entry entry;
  std::vector<int32_t> ids;
};

int64_t count_words(std::string_view text) {
  int64_t words = 0;
  bool inside = false;
  for (const char c : text) {
    const bool space = c == ' ' || (c >= '\t' && c <= '\r');
    words += !space && !inside;
    inside = !space;
  }
  return words;
}

// Collects items, encodes a batch of them on all cores, appends them in order.
class Writer {
 public:
  Writer(const Path& path, const StoreSettings& settings, const Corpus& corpus)
      : path_(path), index_path_(index_of(path)), encode_(settings.encode), corpus_(corpus) {
    header_.width = settings.vocab <= 65536 ? 2 : 4;
    out_.open(path_, std::ios::binary | std::ios::trunc);
    lock_.emplace(path_);
    index_.open(index_path_, std::ios::binary | std::ios::in | std::ios::out | std::ios::trunc);
    append(&header_, sizeof header_);
  }

  ~Writer() {
    std::error_code ignored;
    fs::remove(index_path_, ignored);
    fs::remove(path_, ignored);  // gone already where the store is whole
  }

  void add(const Item& item) {
    pending_.push_back({std::string(item.text),
                        std::string(item.pair),
                        item.file,
                        item.line,
                        {0, label_of(item), 0},
                        {}});
    bytes_ += item.text.size() + item.pair.size();
    if (bytes_ > (8u << 20) || pending_.size() == 16384) flush();
  }

  // Puts the whole file in place and returns the number of its items; without any there is none.
  uint64_t finish(const Path& final_path) {
    flush();
    if (header_.items == 0) return 0;
    const uint64_t bytes = header_.tokens * header_.width;
    append("\0\0\0\0\0\0\0", padded(bytes) - bytes);
    index_.seekg(0);
    out_ << index_.rdbuf();
    out_.flush();
    check();
    header_.checksum = checksum(MappedFile(path_).bytes().substr(sizeof header_));
    out_.seekp(0);
    append(&header_, sizeof header_);
    out_.close();
    check();
    fs::rename(path_, final_path);
    return header_.items;
  }

 private:
  int32_t label_of(const Item& item) const {
    return corpus_.labels.empty() ? -1 : label_index(corpus_, item);
  }

  void flush() {
    const size_t workers = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16);
    std::vector<std::future<void>> running;
    for (size_t worker = 0; worker < workers; ++worker) {
      running.push_back(std::async(std::launch::async, [this, worker, workers] {
        for (size_t i = worker; i < pending_.size(); i += workers) {
          Pending& p = pending_[i];
          p.entry.words = static_cast<uint32_t>(count_words(p.text) + count_words(p.pair));
          encode_({p.text, p.pair, {}, p.file, p.line}, p.ids);
        }
      }));
    }
    for (auto& task : running) task.wait();
    for (auto& task : running) task.get();
    for (const Pending& p : pending_) write(p);
    pending_.clear();
    bytes_ = 0;
    check();
  }

  void write(const Pending& p) {
    for (const int32_t id : p.ids) {
      const uint16_t narrow = static_cast<uint16_t>(id);
      append(header_.width == 2 ? static_cast<const void*>(&narrow) : &id, header_.width);
    }
    header_.tokens += p.ids.size();
    ++header_.items;
    TokenStore::Entry entry = p.entry;
    entry.end = header_.tokens;
    index_.write(reinterpret_cast<const char*>(&entry), sizeof entry);
  }

  void append(const void* data, size_t bytes) {
    out_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  }

  void check() const {
    if (!out_ || !index_) {
      fail(path_, 0, "cannot be written; expected room in the cache folder (task.cache)");
    }
  }

  Path path_, index_path_;
  const Encoder& encode_;
  const Corpus& corpus_;
  std::ofstream out_;
  std::optional<WriteLock> lock_;
  std::fstream index_;
  Header header_;
  std::vector<Pending> pending_;
  size_t bytes_ = 0;  // of text pending
};

std::shared_ptr<const TokenStore> open_cached(const Path& path) {
  std::error_code error;
  if (!fs::exists(path, error)) return nullptr;
  try {
    return std::make_shared<TokenStore>(path);
  } catch (const Error&) {
    return nullptr;  // damaged: made again
  }
}

}  // namespace

TokenStore::TokenStore(const Path& path) : file_(path) {
  const Header header = read_header(path, file_.bytes());
  tokens_ = file_.bytes().data() + sizeof header;
  entries_ = reinterpret_cast<const Entry*>(tokens_ + padded(header.tokens * header.width));
  items_ = header.items;
  wide_ = header.width == 4;
}

void TokenStore::copy(int64_t item, int32_t* out) const {
  const uint64_t first = begin(item);
  const int64_t count = length(item);
  if (wide_) {
    const uint32_t* ids = reinterpret_cast<const uint32_t*>(tokens_) + first;
    std::copy(ids, ids + count, out);
  } else {
    const uint16_t* ids = reinterpret_cast<const uint16_t*>(tokens_) + first;
    std::copy(ids, ids + count, out);
  }
}

std::shared_ptr<const TokenStore> open_store(const Corpus& corpus, Split split,
                                             const StoreSettings& settings) {
  Key key;
  corpus.add_to(key, split);
  key.add(settings.key).add(settings.vocab);
  for (const std::string& label : corpus.labels) key.add(label);
  const Path path = settings.cache / ("tokens-" + key.hex() + ".bin");
  if (auto cached = open_cached(path)) return cached;
  remove_leftovers(settings.cache, "tokens-");
  Writer writer(beside(path), settings, corpus);
  corpus.read(split, [&](const Item& item) { writer.add(item); });
  check_items(corpus, split, writer.finish(path));
  return std::make_shared<TokenStore>(path);
}

}  // namespace sinkhorn::tasks
