#include "serve/page.h"

#include "report/html.h"
#include "report/style.h"

namespace sinkhorn::serve {
namespace {

constexpr const char* kStyle = R"css(
label { display: block; font-size: .82rem; color: var(--quiet); }
textarea, input { display: block; width: 100%; margin-top: .25rem; padding: .55rem .7rem;
  font: inherit; color: var(--ink); background: var(--raised); border: 1px solid var(--rule);
  border-radius: 6px; }
textarea { min-height: 7rem; resize: vertical; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
main > section:first-child { margin-top: 2rem; }
.controls { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr));
  gap: .9rem 1.1rem; margin: 1.1rem 0; }
.actions { display: flex; flex-wrap: wrap; align-items: center; gap: .75rem; }
.actions button, #whole { font: inherit; padding: .45rem 1.2rem; border-radius: 6px;
  border: 1px solid var(--rule); background: var(--raised); color: var(--ink); cursor: pointer; }
#go { background: var(--link); border-color: var(--link); color: var(--paper); font-weight: 600; }
button:disabled { opacity: .45; cursor: default; }
#status { font-size: .88rem; font-variant-numeric: tabular-nums; }
#output { margin: 1.4rem 0 0; padding: 1rem 1.2rem; min-height: 3.6rem; white-space: pre-wrap;
  background: var(--raised); border-radius: 6px; }
#layers { min-height: 2rem; }
)css";

// id, label, attributes of the input.
struct Control {
  const char *id, *label, *attributes;
};
constexpr Control kControls[] = {
    {"temperature", "Temperature", "type=\"number\" min=\"0\" step=\"any\" value=\"1\""},
    {"top_k", "Top k (0: all)", "type=\"number\" min=\"0\" step=\"1\" value=\"0\""},
    {"top_p", "Top p", "type=\"number\" min=\"0\" max=\"1\" step=\"any\" value=\"1\""},
    {"repetition_penalty", "Repetition penalty",
     "type=\"number\" min=\"0\" step=\"any\" value=\"1\""},
    {"seed", "Seed", "type=\"number\" min=\"0\" step=\"1\" placeholder=\"any\""},
    {"stop", "Stop before", "type=\"text\" placeholder=\"nothing\" autocomplete=\"off\""}};

std::string control_html(const Control& control) {
  return std::string("<label>") + control.label + "<input id=\"" + control.id + "\" " +
         control.attributes + "></label>";
}

std::string controls_html(int64_t max_tokens_limit) {
  const std::string most = std::to_string(max_tokens_limit);
  const std::string usual = std::to_string(max_tokens_limit < 256 ? max_tokens_limit : 256);
  const std::string attributes =
      "type=\"number\" min=\"1\" max=\"" + most + "\" step=\"1\" value=\"" + usual + "\"";
  std::string html = "<div class=\"controls\">";
  html += control_html({"max_tokens", "Most tokens", attributes.c_str()});
  for (const Control& control : kControls) html += control_html(control);
  return html + "</div>";
}

constexpr const char* kGenerate =
    "<section><label for=\"prompt\">Text to go on from; without one the model begins as its "
    "training data does</label><textarea id=\"prompt\" spellcheck=\"false\" "
    "autofocus></textarea>";
constexpr const char* kActions =
    "<div class=\"actions\"><button id=\"go\" type=\"button\">Generate</button>"
    "<button id=\"halt\" type=\"button\" disabled>Stop</button>"
    "<span id=\"status\" class=\"quiet\" role=\"status\">Ctrl + Enter generates</span></div>"
    "<div id=\"output\" aria-live=\"off\"><span id=\"given\" class=\"quiet\"></span>"
    "<span id=\"made\"></span></div></section>";
constexpr const char* kSorting =
    "<section id=\"sorting\"><h2>What is sorted where</h2><p class=\"quiet\">One picture a head, "
    "of "
    "the text typed: a row is the block that reads, a column the block that is read, both from the "
    "first; dark is nothing, light is all.</p><p><button id=\"whole\" type=\"button\" disabled>"
    "Sort what was generated too</button></p><p id=\"sorted\" class=\"quiet\" role=\"status\">"
    "Type some text.</p><div id=\"layers\"></div></section>";

}  // namespace

std::string page_html(const std::string& model, int64_t max_tokens_limit) {
  const std::string name = report::escape(model);
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
         name + ": sinkhorn</title>\n<link rel=\"icon\" href=\"data:,\">\n<style>\n" +
         report::page_style() + kStyle +
         "</style>\n</head>\n<body>\n<header><button id=\"theme\" type=\"button\" "
         "aria-label=\"switch between light and dark\">\xE2\x97\x90</button><h1>" +
         name +
         "</h1><p class=\"quiet\">a language model, served by sinkhorn</p></header>\n<main>\n" +
         kGenerate + controls_html(max_tokens_limit) + kActions + kSorting + "</main>\n<script>\n" +
         report::page_script() + page_script() + "</script>\n</body>\n</html>\n";
}

}  // namespace sinkhorn::serve
