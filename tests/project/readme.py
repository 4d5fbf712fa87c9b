"""Runs the README's Python example, or writes out its C++ example.

readme.py README.md run
readme.py README.md cpp FILE
"""

import re
import sys
from pathlib import Path


def example(readme: str, language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)
    if len(found) != 1:
        sys.exit(f"README.md must have exactly one {language} example, found {len(found)}")
    lines = [line for line in found[0].splitlines() if line.strip()]
    if len(lines) > 16:
        sys.exit(f"the README's {language} example has grown to {len(lines)} lines")
    return found[0]


readme = Path(sys.argv[1]).read_text()
if sys.argv[2] == "run":
    exec(compile(example(readme, "python"), "README.md", "exec"), {"__name__": "__main__"})
else:
    target = Path(sys.argv[3])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(example(readme, "cpp"))
