// The fields of a request's JSON object, read with the checks that a stranger's input needs: every
// function throws Refusal 400, which names the field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace sinkhorn::serve {

class Fields {
 public:
  // Parses the body, which must be one JSON object.
  explicit Fields(const std::string& body);

  // A field that is absent or null has its default.
  bool flag(const std::string& name, bool otherwise);
  double number(const std::string& name, double otherwise);
  int64_t integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most);
  uint64_t natural(const std::string& name, uint64_t otherwise);
  std::string text(const std::string& name, const std::string& otherwise);
  // One text or an array of `least` to `most`; none: absent.
  std::vector<std::string> texts(const std::string& name, size_t least, size_t most);
  // An object of its own, for the one field `inner`.
  bool inner_flag(const std::string& name, const std::string& inner);

  // What would change the answer and is not done: only `neutral` or null will do.
  void unsupported(const std::string& name, const nlohmann::json& neutral = nullptr);
  void ignored(const std::string& name) { known_.insert(name); }

  // Refuses fields that nothing asked for.
  void check_all_known() const;

 private:
  const nlohmann::json* find(const std::string& name);
  const nlohmann::json* find_natural(const std::string& name, const std::string& range);

  nlohmann::json object_;
  std::set<std::string> known_;
};

}  // namespace sinkhorn::serve
