// A request that is not served, as its sender is told.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "sinkhorn/error.h"

namespace sinkhorn::serve {

class Refusal : public Error {
 public:
  // param: the field that is wrong, "" for none; code: a word for programs, "" for none.
  Refusal(int http_status, const std::string& message, std::string field = "",
          std::string word = "")
      : Error(message), status(http_status), param(std::move(field)), code(std::move(word)) {}

  int status;
  std::string param, code;
};

// As OpenAI's: {"error": {"message", "type", "param", "code"}}.
nlohmann::ordered_json error_object(const Refusal& refusal);

// JSON on one line; what a model says need not be UTF-8, what we send is.
std::string dumped(const nlohmann::ordered_json& object);

}  // namespace sinkhorn::serve
