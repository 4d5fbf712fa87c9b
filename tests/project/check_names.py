"""Fails on a name that nothing defines in a Python file of the project: what runs only where there is a
GPU, or only when something fails, is run too seldom to show it."""

import ast
import sys
from pathlib import Path

from pyflakes import checker, messages

UNDEFINED = (messages.UndefinedName, messages.UndefinedLocal, messages.UndefinedExport)

root = Path(sys.argv[1])
files = [root / "tools" / "demo", *(p for folder in ("bench", "python", "tests")
                                    for p in (root / folder).rglob("*.py"))]
found = [f"{path}:{m.lineno}: {m.message % m.message_args}"
         for path in files
         for m in checker.Checker(ast.parse(path.read_text()), str(path)).messages
         if isinstance(m, UNDEFINED)]
print(f"{len(files)} files, {len(found)} undefined names", *found, sep="\n")
sys.exit(1 if found or len(files) < 50 else 0)
