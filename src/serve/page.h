// The page at GET /: it needs nothing but this server.
#pragma once

#include <cstdint>
#include <string>

namespace sinkhorn::serve {

std::string page_html(const std::string& model, int64_t max_tokens_limit);

// The page's own script; what comes from the server is only ever set as text.
std::string page_script();

}  // namespace sinkhorn::serve
