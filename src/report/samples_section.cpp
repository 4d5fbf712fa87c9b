// Test examples beside what the models say to them.
#include <sstream>

#include "report/groups.h"
#include "report/html.h"
#include "report/sections.h"

namespace sinkhorn::report {
namespace {

constexpr size_t kMostCharacters = 600;  // of one part of a sample
constexpr int kPixel = 4;                // of a picture's pixels, on the screen

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

// What was said, with the words that differ from those wanted in the same places marked.
std::string marked(const std::string& said, const std::string& wanted) {
  const std::vector<std::string> right = words_of(wanted);
  std::string html;
  size_t place = 0;
  for (const std::string& word : words_of(shortened(said, kMostCharacters))) {
    const bool same = place < right.size() && right[place] == word;
    html += (place == 0 ? "" : " ") + (same ? escape(word) : "<mark>" + escape(word) + "</mark>");
    ++place;
  }
  return html;
}

std::string sample_html(const Sample& sample) {
  std::string html = "<dl class=\"sample\">";
  for (size_t i = 0; i < sample.parts.size(); ++i) {
    const Sample::Part& part = sample.parts[i];
    const bool last = i + 1 == sample.parts.size();
    html += "<dt>" + escape(part.name);
    if (last && sample.judged) {
      html += sample.right ? " <span class=\"right\">right</span>"
                           : " <span class=\"wrong\">wrong</span>";
    }
    if (part.image.width > 0) {
      html += "</dt><dd>" + picture(part.image, kPixel, part.name) + "</dd>";
      continue;
    }
    const bool mark = last && sample.judged && sample.words && !sample.right && i > 0 &&
                      part.text.size() <= kMostCharacters;
    html += "</dt><dd>" +
            (mark ? marked(part.text, sample.parts[i - 1].text)
                  : escape(shortened(part.text, kMostCharacters))) +
            "</dd>";
  }
  return html + "</dl>";
}

std::string run_details(const Run& run, bool open) {
  std::string html = std::string("<details class=\"run\"") + (open ? " open" : "") + "><summary>" +
                     escape(run.name) + "</summary>";
  for (const Sample& sample : run.samples) html += sample_html(sample);
  return html + "</details>";
}

}  // namespace

std::string samples_section(const std::vector<Run>& runs) {
  const std::vector<Group> groups = grouped(runs);
  std::string html;
  for (const Group& group : groups) {
    std::string part;
    for (const Run* run : group.runs) {
      if (!run->samples.empty()) part += run_details(*run, html.empty() && part.empty());
    }
    if (!part.empty()) html += (groups.size() > 1 ? group_heading(group) : "") + part;
  }
  if (html.empty()) return "";
  return "<section id=\"samples\"><h2>Samples</h2><p class=\"quiet\">Examples of the test split, "
         "spread evenly over it.</p>" +
         html + "</section>";
}

}  // namespace sinkhorn::report
