#include "serve/refusal.h"

namespace sinkhorn::serve {
namespace {

const char* type_of(int status) {
  if (status == 429) return "rate_limit_error";
  return status >= 500 ? "server_error" : "invalid_request_error";
}

nlohmann::ordered_json or_null(const std::string& text) {
  return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
}

}  // namespace

nlohmann::ordered_json error_object(const Refusal& refusal) {
  return {{"error",
           {{"message", refusal.what()},
            {"type", type_of(refusal.status)},
            {"param", or_null(refusal.param)},
            {"code", or_null(refusal.code)}}}};
}

std::string dumped(const nlohmann::ordered_json& object) {
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace sinkhorn::serve
