// Shell completion, written from the program's own tree of commands and options, so that it cannot
// fall behind. Words that take a choice complete to it; all else falls back to file names.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <sstream>

#include "cli/commands.h"
#include "sinkhorn/error.h"

namespace sinkhorn::cli {
namespace {

struct OptionWords {
  std::string name;  // --long
  std::string help;
  std::string choices;  // separated by spaces; empty: a flag, or anything
  bool takes_value;
};

// One command: " data check", what may follow it, and its options.
struct Node {
  std::string path;
  std::vector<std::pair<std::string, std::string>> children;  // name, help
  std::vector<OptionWords> options;
};

std::string choices_of(const CLI::Option& option) {
  std::string type = option.get_type_name();
  if (type.size() < 2 || type.front() != '{') return "";
  type = type.substr(1, type.size() - 2);
  std::replace(type.begin(), type.end(), ',', ' ');
  return type;
}

void walk(const CLI::App& app, const std::string& path, std::vector<Node>& nodes) {
  Node node{path, {}, {}};
  for (const CLI::App* child : app.get_subcommands(nullptr)) {
    node.children.emplace_back(child->get_name(), child->get_description());
  }
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      node.options.push_back({"--" + name, option->get_description(), choices_of(*option),
                              option->get_items_expected_max() > 0});
    }
    if (option->get_positional() && !choices_of(*option).empty()) {
      std::istringstream words(choices_of(*option));
      for (std::string word; words >> word;) node.children.emplace_back(word, option->get_name());
    }
  }
  nodes.push_back(node);
  for (const CLI::App* child : app.get_subcommands(nullptr)) {
    walk(*child, path + " " + child->get_name(), nodes);
  }
}

// The two case statements that bash and zsh share: which command the line names, and its words.
std::string path_cases(const std::vector<Node>& nodes) {
  std::string cases;
  for (const Node& node : nodes) {
    if (!node.path.empty()) cases += "      '" + node.path + "') here=\"$here $word\" ;;\n";
  }
  return cases;
}

std::string word_cases(const std::vector<Node>& nodes) {
  std::string cases;
  for (const Node& node : nodes) {
    cases += "    '" + node.path + "') candidates='";
    for (const auto& [name, help] : node.children) cases += name + " ";
    for (const OptionWords& option : node.options) cases += option.name + " ";
    cases.back() = '\'';
    cases += " ;;\n";
  }
  return cases;
}

std::string choice_cases(const std::vector<Node>& nodes) {
  std::string cases;
  for (const Node& node : nodes) {
    for (const OptionWords& option : node.options) {
      if (!option.takes_value) continue;
      cases +=
          "    '" + node.path + " " + option.name + "') candidates='" + option.choices + "' ;;\n";
    }
  }
  return cases;
}

std::string posix_body(const std::vector<Node>& nodes) {
  return "  for word in \"${before[@]}\"; do\n    case \"$here $word\" in\n" + path_cases(nodes) +
         "    esac\n  done\n  case \"$here\" in\n" + word_cases(nodes) +
         "  esac\n  case \"$here $previous\" in\n" + choice_cases(nodes) + "  esac\n";
}

std::string bash_script(const std::vector<Node>& nodes) {
  return "# bash completion for sinkhorn: source <(sinkhorn completion bash)\n"
         "_sinkhorn() {\n"
         "  local here='' word candidates='' current=\"${COMP_WORDS[COMP_CWORD]}\"\n"
         "  local previous=\"${COMP_WORDS[COMP_CWORD-1]}\"\n"
         "  local before=(\"${COMP_WORDS[@]:1:COMP_CWORD-1}\")\n" +
         posix_body(nodes) +
         "  COMPREPLY=($(compgen -W \"$candidates\" -- \"$current\"))\n"
         "}\n"
         "complete -o default -F _sinkhorn sinkhorn\n";
}

std::string zsh_script(const std::vector<Node>& nodes) {
  return "#compdef sinkhorn\n"
         "# zsh completion for sinkhorn: source <(sinkhorn completion zsh)\n"
         "_sinkhorn() {\n"
         "  local here='' word candidates='' previous=\"${words[CURRENT-1]}\"\n"
         "  local -a before=(\"${(@)words[2,CURRENT-1]}\")\n" +
         posix_body(nodes) +
         "  compadd -- ${=candidates} || _files\n"
         "}\n"
         "compdef _sinkhorn sinkhorn\n";
}

std::string fish_quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text)
    quoted += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return quoted + "'";
}

std::string fish_script(const std::vector<Node>& nodes) {
  std::string script = "# fish completion for sinkhorn: sinkhorn completion fish | source\n";
  for (const Node& node : nodes) {
    std::string condition;
    std::istringstream words(node.path);
    for (std::string word; words >> word;) {
      condition += (condition.empty() ? "" : "; and ") + ("__fish_seen_subcommand_from " + word);
    }
    // "train" alone is not that of "tokenizer train".
    for (const Node& other : nodes) {
      const size_t space = other.path.rfind(' ');
      if (space > 0 && space != std::string::npos && other.path.substr(space) == node.path) {
        condition += "; and not __fish_seen_subcommand_from" + other.path.substr(0, space);
      }
    }
    if (condition.empty()) condition = "__fish_use_subcommand";
    const std::string start = "complete -c sinkhorn -n " + fish_quoted(condition);
    for (const auto& [name, help] : node.children) {
      script += start + " -a " + name + " -d " + fish_quoted(help) + "\n";
    }
    for (const OptionWords& option : node.options) {
      script += start + " -l " + option.name.substr(2) + " -d " + fish_quoted(option.help);
      if (option.takes_value) script += " -r";
      if (!option.choices.empty()) script += " -f -a " + fish_quoted(option.choices);
      script += "\n";
    }
  }
  return script;
}

}  // namespace

Command add_completion(CLI::App& program) {
  CLI::App* app = program.add_subcommand("completion", "Print a completion script for a shell");
  auto shell = std::make_shared<std::string>();
  app->add_option("SHELL", *shell, "the shell")->required()->type_name("{bash,zsh,fish}");
  return {app, [shell, &program] {
            std::vector<Node> nodes;
            walk(program, "", nodes);
            if (*shell == "bash") {
              std::cout << bash_script(nodes);
            } else if (*shell == "zsh") {
              std::cout << zsh_script(nodes);
            } else if (*shell == "fish") {
              std::cout << fish_script(nodes);
            } else {
              throw UsageError("completion: \"" + *shell + "\" is not one of bash, zsh, fish");
            }
            return 0;
          }};
}

}  // namespace sinkhorn::cli
