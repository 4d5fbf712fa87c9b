// Stands in for server.cpp where there is no cpp-httplib.
#include "serve/serve.h"
#include "sinkhorn/error.h"

namespace sinkhorn::serve {

void serve(const train::RunConfig&, const ServeOptions&,
           const std::function<void(const std::string&)>&, const std::function<bool()>&) {
  throw Error(
      "this build has no server: install cpp-httplib and pkg-config (Debian and Ubuntu: "
      "libcpp-httplib-dev pkg-config) and build again");
}

}  // namespace sinkhorn::serve
