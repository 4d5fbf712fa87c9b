#include "report/page.h"

#include "report/html.h"
#include "report/sections.h"
#include "report/style.h"

namespace sinkhorn::report {
namespace {

// A link to each section that there is.
std::string navigation(const std::string& body) {
  constexpr std::pair<const char*, const char*> kSections[] = {{"tables", "Tables"},
                                                               {"curves", "Curves"},
                                                               {"speed", "Speed"},
                                                               {"sorting", "Sorting"},
                                                               {"samples", "Samples"}};
  std::string html = "<nav>";
  for (const auto& [id, name] : kSections) {
    if (body.find(std::string("<section id=\"") + id + "\">") == std::string::npos) continue;
    html += std::string("<a href=\"#") + id + "\">" + name + "</a>";
  }
  return html + "</nav>";
}

std::string problems_html(const std::vector<std::string>& problems) {
  if (problems.empty()) return "";
  std::string html = "<aside id=\"problems\"><h2>Left out</h2><ul>";
  for (const std::string& problem : problems) html += "<li>" + escape(problem) + "</li>";
  return html + "</ul></aside>";
}

std::string contents(const Page& page) {
  std::string text;
  if (!page.tables.empty()) {
    text = with_unit(static_cast<int64_t>(page.tables.size()), "table");
  }
  if (!page.runs.empty()) {
    text += (text.empty() ? "" : ", ") + with_unit(static_cast<int64_t>(page.runs.size()), "run");
  }
  return text;
}

}  // namespace

std::string page_html(const Page& page) {
  const std::string body = tables_section(page.tables) + curves_section(page.runs) +
                           speed_section(page.runs) + sorting_section(page.runs) +
                           samples_section(page.runs);
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<title>Sparse Sinkhorn Attention: report</title>\n<link rel=\"icon\" href=\"data:,\">\n"
         "<style>\n" +
         page_style() + "</style>\n</head>\n<body>\n<header><button id=\"theme\" type=\"button\" " +
         "aria-label=\"switch between light and dark\">\xE2\x97\x90</button>" +
         "<h1>Sparse Sinkhorn Attention</h1><p class=\"quiet\">" + escape(contents(page)) +
         (page.written.empty() ? "" : " \xC2\xB7 " + escape(page.written)) + "</p>" +
         navigation(body) + "</header>\n<main>\n" + problems_html(page.problems) + body +
         "</main>\n<script>\n" + page_script() + "</script>\n</body>\n</html>\n";
}

}  // namespace sinkhorn::report
