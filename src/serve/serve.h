// `sinkhorn serve`: a language model behind a local web page and an OpenAI-style interface. Where
// the build has no cpp-httplib, absent.cpp says so. No Torch in this header.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "train/config.h"

namespace sinkhorn::serve {

struct ServeOptions {
  std::string checkpoint = "newest";
  std::string model;  // the name that requests call it by
  std::string host = "127.0.0.1";
  int port = 8080;                      // 0: any free one
  int64_t slots = 8;                    // sequences decoded together
  int64_t queue = 64;                   // requests that wait for a slot; more are refused
  int64_t max_tokens_limit = 4096;      // of one answer
  int64_t max_request_bytes = 1 << 20;  // of a request's body
  double timeout = 300;                 // seconds from a request's arrival to its last token
};

// Whether only this machine can reach the address.
bool is_loopback(const std::string& host);

// Serves until `stopped` says so; then requests that run may take a few seconds more. `listening`
// is called once, with the address, when clients can connect. Throws UsageError for a model that
// makes no text, Error for an address that cannot be had.
void serve(const train::RunConfig& config, const ServeOptions& options,
           const std::function<void(const std::string& address)>& listening,
           const std::function<bool()>& stopped);

}  // namespace sinkhorn::serve
