"""Count lines that hold something else than a comment: how long a platform is.

python docs/count_lines.py FILE ...
"""

import io
import sys
import tokenize
from pathlib import Path

EMPTY = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def count_lines(path: Path) -> int:
    """Of Python by its tokens, a docstring with every line; of C-like kernels those that are neither blank nor `//`."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in EMPTY:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


if __name__ == "__main__":
    counts = {name: count_lines(Path(name)) for name in sys.argv[1:]}
    for name, count in counts.items():
        print(f"{count:5} {name}")
    print(f"{sum(counts.values()):5} in all")
