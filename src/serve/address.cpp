#include "serve/serve.h"

namespace sinkhorn::serve {

bool is_loopback(const std::string& host) {
  // A name such as 127.example.org is anybody's.
  const bool number = host.find_first_not_of("0123456789.") == std::string::npos;
  return host == "localhost" || host == "::1" || host == "[::1]" ||
         (number && host.starts_with("127."));
}

}  // namespace sinkhorn::serve
