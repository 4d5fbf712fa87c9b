#include "serve/fields.h"

#include <cmath>
#include <limits>

#include "serve/refusal.h"

namespace sinkhorn::serve {
namespace {

using nlohmann::json;

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw Refusal(400, name + " " + why, name);
}

[[noreturn]] void refuse_kind(const std::string& name, const json& value, const char* expected) {
  refuse(name, std::string("is of the type ") + value.type_name() + "; it must be " + expected);
}

json parse(const std::string& body) {
  try {
    return json::parse(body);
  } catch (const json::exception& error) {
    const std::string message = error.what();  // "[json.exception...] what is wrong"
    const size_t end = message.find("] ");
    throw Refusal(400, "the body is not JSON: " +
                           (end == std::string::npos ? message : message.substr(end + 2)));
  }
}

}  // namespace

Fields::Fields(const std::string& body) : object_(parse(body)) {
  if (object_.is_object()) return;
  throw Refusal(400, std::string("the body is of the type ") + object_.type_name() +
                         "; it must be a JSON object");
}

const json* Fields::find(const std::string& name) {
  known_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool Fields::flag(const std::string& name, bool otherwise) {
  const json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse_kind(name, *value, "true or false");
  return value->get<bool>();
}

double Fields::number(const std::string& name, double otherwise) {
  const json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_number()) refuse_kind(name, *value, "a number");
  return value->get<double>();
}

const json* Fields::find_natural(const std::string& name, const std::string& range) {
  const json* value = find(name);
  if (value == nullptr) return nullptr;
  if (!value->is_number()) refuse_kind(name, *value, "an integer");
  if (!value->is_number_unsigned()) refuse(name, "must be an integer from " + range);
  return value;
}

uint64_t Fields::natural(const std::string& name, uint64_t otherwise) {
  const json* value = find_natural(name, "0 to 2^64 - 1");
  return value == nullptr ? otherwise : value->get<uint64_t>();
}

int64_t Fields::integer(const std::string& name, int64_t otherwise, int64_t least, int64_t most) {
  const std::string range = std::to_string(least) + " to " + std::to_string(most);
  const json* found = find_natural(name, range);
  if (found == nullptr) return otherwise;
  const uint64_t value = found->get<uint64_t>();
  if (value < static_cast<uint64_t>(least) || value > static_cast<uint64_t>(most)) {
    refuse(name, "is " + std::to_string(value) + "; it must be from " + range);
  }
  return static_cast<int64_t>(value);
}

std::string Fields::text(const std::string& name, const std::string& otherwise) {
  const json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_string()) refuse_kind(name, *value, "a string");
  return value->get<std::string>();
}

std::vector<std::string> Fields::texts(const std::string& name, size_t least, size_t most) {
  const json* value = find(name);
  if (value == nullptr) return {};
  if (value->is_string()) return {value->get<std::string>()};
  if (!value->is_array()) refuse_kind(name, *value, "a string or an array of strings");
  if (value->size() < least) {
    refuse(name, "is an empty array; leave it out, or give at least one string");
  }
  if (value->size() > most) {
    refuse(name, "has " + std::to_string(value->size()) + " entries; at most " +
                     std::to_string(most) + " are taken");
  }
  std::vector<std::string> texts;
  for (const json& item : *value) {
    if (!item.is_string())
      refuse(name,
             "has an entry of the type " + std::string(item.type_name()) + "; strings are taken");
    texts.push_back(item.get<std::string>());
  }
  return texts;
}

bool Fields::inner_flag(const std::string& name, const std::string& inner) {
  const json* value = find(name);
  if (value == nullptr) return false;
  if (!value->is_object()) refuse_kind(name, *value, "an object");
  for (const auto& [key, item] : value->items()) {
    if (key != inner) refuse(name, "has the unknown field " + key);
    if (item.is_boolean()) return item.get<bool>();
    if (!item.is_null()) refuse_kind(name + "." + key, item, "true or false");
  }
  return false;
}

void Fields::unsupported(const std::string& name, const json& neutral) {
  const json* value = find(name);
  if (value == nullptr || *value == neutral) return;
  refuse(name, "is not supported; leave it out");
}

void Fields::check_all_known() const {
  for (const auto& [name, value] : object_.items()) {
    if (!known_.contains(name)) refuse(name, "is not a known field; leave it out");
  }
}

}  // namespace sinkhorn::serve
