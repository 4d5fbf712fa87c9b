// The web server around the engine. One request a connection, so that an idle one holds no thread;
// there is a thread for everything that may run or wait, and beside them many for the page and for
// senders that dawdle.
#include <httplib.h>
#include <netdb.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <thread>

#include "serve/completion.h"
#include "serve/engine.h"
#include "serve/fields.h"
#include "serve/page.h"
#include "serve/serve.h"
#include "serve/sorting.h"

namespace sinkhorn::serve {
namespace {

using httplib::Request;
using httplib::Response;
using nlohmann::ordered_json;

constexpr const char* kJson = "application/json";
constexpr const char* kEvents = "text/event-stream";  // httplib compresses, and so delays, others
constexpr int64_t kSpareThreads = 128;
constexpr int kReadSeconds = 2;   // that a request may pause, before it and within it
constexpr int kWriteSeconds = 5;  // that a client may take in nothing
constexpr int kRetrySeconds = 1;
constexpr std::chrono::milliseconds kPoll{100};    // between looks at whether the client is there
constexpr std::chrono::milliseconds kFlush{3000};  // for the last bytes of what was made

void answer(Response& res, const Refusal& refusal) {
  res.status = refusal.status;
  if (refusal.status == 429 || refusal.status == 503) {
    res.set_header("Retry-After", std::to_string(kRetrySeconds));
  }
  res.set_content(dumped(error_object(refusal)) + "\n", kJson);
}

void answer_exception(Response& res, std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Refusal& refusal) {
    answer(res, refusal);
  } catch (const UsageError& error) {
    answer(res, Refusal(400, error.what()));
  } catch (const std::exception& error) {
    answer(res, Refusal(500, error.what()));
  }
}

// The method of a place that is here, "" for others.
std::string method_of(const std::string& path) {
  if (path == "/" || path == "/health" || path == "/v1/models") return "GET";
  return path == "/v1/completions" || path == "/v1/sorting" ? "POST" : "";
}

// What httplib refuses by itself: it has no words for it.
void answer_status(const Request& req, Response& res, int64_t most_bytes) {
  if (!res.body.empty()) return;
  std::string message = "the request is not HTTP as this server reads it";
  if (res.status == 404) {
    const std::string method = method_of(req.path);
    if (!method.empty()) {
      res.set_header("Allow", method);
      return answer(res, Refusal(405, req.path + " takes " + method + ", not " + req.method));
    }
    message = "there is no " + req.method + " " + req.path + " here; see GET /";
  }
  if (res.status == 413) {
    message = "the body is too long; at most " + std::to_string(most_bytes) + " bytes are read";
  }
  if (res.status >= 500) message = "the request could not be answered";
  answer(res, Refusal(res.status, message));
}

std::string without_port(const std::string& host) {
  const size_t colon = host.rfind(':');
  const bool has_port = colon != std::string::npos && host.find(']', colon) == std::string::npos;
  return has_port ? host.substr(0, colon) : host;
}

// "application/json" of " Application/JSON ; charset=utf-8".
std::string media_type(const std::string& header) {
  std::string type = header.substr(0, header.find(';'));
  std::erase_if(type, [](unsigned char c) { return c == ' ' || c == '\t'; });
  std::transform(type.begin(), type.end(), type.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return type;
}

// Why a host's name leads nowhere, "" if it does lead somewhere.
std::string why_unresolved(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) return gai_strerror(error);
  freeaddrinfo(found);
  return "";
}

int as_port(httplib::Server& http, const std::string& host, int port) {
  if (port == 0) return http.bind_to_any_port(host);
  return http.bind_to_port(host, port) ? port : -1;
}

class WebServer {
 public:
  WebServer(Engine& engine, const ServeOptions& options) : engine_(engine), options_(options) {
    configure();
    const auto checked = [this](void (WebServer::*serve)(const Request&, Response&)) {
      return [this, serve](const Request& req, Response& res) {
        check_sender(req);
        res.status = 200;  // whatever Range a client asks for
        (this->*serve)(req, res);
      };
    };
    http_.Get("/", checked(&WebServer::show_page));
    http_.Get("/health", checked(&WebServer::tell_health));
    http_.Get("/v1/models", checked(&WebServer::list_models));
    http_.Post("/v1/completions", checked(&WebServer::complete));
    http_.Post("/v1/sorting", checked(&WebServer::show_sorts));
  }

  ~WebServer() { close(); }

  // Returns the address.
  std::string open() {
    const int port = as_port(http_, options_.host, options_.port);
    if (port < 0) refuse_address(errno);
    listen(socket_, SOMAXCONN);  // httplib's five are too few for clients that come together
    listener_ = std::thread([this] {
      try {
        http_.listen_after_bind();
      } catch (...) {
        failure_ = std::current_exception();
      }
      listened_ = true;
    });
    const bool v6 = options_.host.find(':') != std::string::npos;
    return "http://" + (v6 ? "[" + options_.host + "]" : options_.host) + ":" +
           std::to_string(port) + "/";
  }

  // Lets answers that are made be sent, then closes every connection.
  void close() {
    if (!listener_.joinable()) return;
    const auto end = Clock::now() + kFlush;
    while (answering_ > 0 && Clock::now() < end) std::this_thread::sleep_for(kPoll / 4);
    closing_ = true;
    // A server that does not run yet cannot be stopped.
    while (!http_.is_running() && !listened_) std::this_thread::yield();
    http_.stop();
    listener_.join();
  }

  bool ended() const { return listened_; }
  std::exception_ptr failure() const { return failure_; }  // after close()

 private:
  [[noreturn]] void refuse_address(int error) const;
  void configure();
  void check_sender(const Request& req) const;
  void show_page(const Request& req, Response& res);
  void tell_health(const Request& req, Response& res);
  void list_models(const Request& req, Response& res);
  void complete(const Request& req, Response& res);
  void show_sorts(const Request& req, Response& res);
  std::vector<int32_t> read_prompt(const std::string& text, const char* field) const;
  Clock::time_point deadline() const {
    return Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * options_.timeout));
  }
  std::shared_ptr<void> count_answer() {
    ++answering_;
    return {nullptr, [this](void*) { --answering_; }};
  }

  Engine& engine_;
  const ServeOptions& options_;
  const int64_t opened_ = unix_seconds();
  httplib::Server http_;
  socket_t socket_ = INVALID_SOCKET;
  std::thread listener_;
  std::atomic<int> answering_{0};
  std::atomic<bool> closing_{false}, listened_{false};
  std::exception_ptr failure_;
};

void WebServer::refuse_address(int error) const {
  const std::string unresolved = why_unresolved(options_.host);
  if (!unresolved.empty()) {
    throw Error("--host " + options_.host + ": the name cannot be resolved: " + unresolved +
                "; give an address of this machine, such as 127.0.0.1");
  }
  throw Error(options_.host + ":" + std::to_string(options_.port) + ": cannot listen there: " +
              std::strerror(error) + "; choose another --port or --host");
}

void WebServer::configure() {
  http_.new_task_queue = [threads = options_.slots + options_.queue + kSpareThreads] {
    return new httplib::ThreadPool(static_cast<size_t>(threads));
  };
  // Not the default, which lets a second server take the same port.
  http_.set_socket_options([this](socket_t socket) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    socket_ = socket;
  });
  http_.set_tcp_nodelay(true);
  http_.set_keep_alive_max_count(1);
  http_.set_keep_alive_timeout(kReadSeconds);
  http_.set_read_timeout(kReadSeconds);
  http_.set_write_timeout(kWriteSeconds);
  http_.set_payload_max_length(static_cast<size_t>(options_.max_request_bytes));
  http_.set_default_headers({{"Cache-Control", "no-store"},
                             {"X-Content-Type-Options", "nosniff"},
                             {"Referrer-Policy", "no-referrer"}});
  // A few packed bytes can unpack to more than there is memory for.
  http_.set_pre_routing_handler([](const Request& req, Response& res) {
    if (!req.has_header("Content-Encoding")) return httplib::Server::HandlerResponse::Unhandled;
    answer(res, Refusal(415, "the body is compressed; send it as it is"));
    return httplib::Server::HandlerResponse::Handled;
  });
  http_.set_exception_handler([](const Request&, Response& res, std::exception_ptr thrown) {
    answer_exception(res, thrown);
  });
  http_.set_error_handler([this](const Request& req, Response& res) {
    answer_status(req, res, options_.max_request_bytes);
  });
}

// A page of another site, open in a browser on this machine, must not use the model: it cannot send
// JSON here without asking first, and a name of its own that leads here is not ours.
void WebServer::check_sender(const Request& req) const {
  const std::string host = without_port(req.get_header_value("Host"));
  if (is_loopback(options_.host) && !host.empty() && !is_loopback(host) && host != options_.host) {
    throw Refusal(403, "the Host header names '" + host + "'; this server answers to " +
                           options_.host + " and localhost");
  }
  const std::string type = req.get_header_value("Content-Type");
  if (req.method == "POST" && media_type(type) != kJson) {
    throw Refusal(415, "the Content-Type is '" + type + "'; it must be application/json");
  }
}

void WebServer::show_page(const Request&, Response& res) {
  res.set_header(
      "Content-Security-Policy",
      "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
      "frame-ancestors 'none'");
  res.set_content(page_html(options_.model, options_.max_tokens_limit), "text/html; charset=utf-8");
}

void WebServer::tell_health(const Request&, Response& res) {
  const ordered_json health = {{"status", "ok"},
                               {"model", options_.model},
                               {"slots", engine_.slots()},
                               {"active", engine_.active()},
                               {"waiting", engine_.waiting()},
                               {"capacity", engine_.capacity()}};
  res.set_content(dumped(health) + "\n", kJson);
}

void WebServer::list_models(const Request&, Response& res) {
  ordered_json model = {
      {"id", options_.model}, {"object", "model"}, {"created", opened_}, {"owned_by", "sinkhorn"}};
  ordered_json list = {{"object", "list"}, {"data", ordered_json::array()}};
  list["data"].push_back(std::move(model));
  res.set_content(dumped(list) + "\n", kJson);
}

std::vector<int32_t> WebServer::read_prompt(const std::string& text, const char* field) const {
  try {
    return engine_.prompt_ids(text);
  } catch (const UsageError& error) {
    throw Refusal(400, error.what(), field);
  }
}

void WebServer::complete(const Request& req, Response& res) {
  CompletionRequest request =
      read_completion(req.body, {options_.model, options_.max_tokens_limit});
  int64_t prompt_tokens = 0;
  const auto add = [&](const std::vector<int32_t>& ids) {
    prompt_tokens += static_cast<int64_t>(ids.size());
    for (int64_t i = 0; i < request.choices; ++i) {
      request.asked.sequences.push_back({ids, static_cast<uint64_t>(i)});
    }
  };
  if (request.prompts.empty()) add({});
  for (const std::string& prompt : request.prompts) add(read_prompt(prompt, "prompt"));
  request.asked.deadline = deadline();
  const std::shared_ptr<Job> job = engine_.submit(std::move(request.asked));
  const auto reply = std::make_shared<CompletionAnswer>(request, options_.model, prompt_tokens);
  const auto counted = count_answer();
  // What goes wrong before the first token can still be told by a status.
  std::vector<Event> first;
  while (first.empty()) {
    if (closing_) throw Refusal(503, "the server is ending");
    first = job->wait(kPoll);
  }
  const auto head = std::make_shared<std::string>(reply->add(first));
  res.set_chunked_content_provider(
      request.stream ? kEvents : kJson,
      [job, reply, head, counted, streams = request.stream](size_t, httplib::DataSink& sink) {
        std::string text;
        text.swap(*head);
        // The end is seen after what was made before it.
        const bool last = job->finished();
        if (last) text += reply->finish();
        if (!text.empty() && !sink.write(text.data(), text.size())) return false;
        if (last) {
          sink.done();
          return true;
        }
        try {
          *head = reply->add(job->wait(kPoll));
        } catch (const Refusal& refusal) {
          // The status is sent: a stream tells, another answer is broken off.
          const std::string error = "data: " + dumped(error_object(refusal)) + "\n\n";
          if (streams) sink.write(error.data(), error.size());
          return false;
        }
        return sink.is_writable();
      },
      [job](bool) { job->cancel(); });
}

void WebServer::show_sorts(const Request& req, Response& res) {
  Fields fields(req.body);
  const std::string text = fields.text("text", "");
  const bool values = fields.flag("values", false);
  fields.check_all_known();
  if (text.empty()) throw Refusal(400, "text is empty; it must be some text", "text");
  read_prompt(text, "text");
  auto found = engine_.sorts(text);
  if (found.wait_until(deadline()) != std::future_status::ready) {
    throw Refusal(503, "the matrices were not made within the time limit; try again later", "",
                  "timeout");
  }
  const ordered_json object =
      sorting_object(found.get(), {engine_.task(), text, engine_.block(), values});
  res.set_content(dumped(object) + "\n", kJson);
}

}  // namespace

void serve(const train::RunConfig& config, const ServeOptions& options,
           const std::function<void(const std::string&)>& listening,
           const std::function<bool()>& stopped) {
  Engine engine(train::open_run(config, options.checkpoint),
                {config.task.name, options.slots, options.queue});
  WebServer web(engine, options);
  listening(web.open());
  engine.run([&] { return stopped() || web.ended(); });
  web.close();
  if (web.failure() != nullptr) std::rethrow_exception(web.failure());
}

}  // namespace sinkhorn::serve
