// How the page looks: its style sheet, and the script of its one button.
#pragma once

#include <string>

namespace sinkhorn::report {

std::string page_style();
std::string page_script();

}  // namespace sinkhorn::report
