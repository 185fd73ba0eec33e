"""Run the conformance kit on platforms and write the table of support into platforms.md.

    python docs/support_table.py NAME ... [FILE.json ...]

Each argument is a platform's name, or a file that `octavo conformance --json` has written elsewhere.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from octavo.testing import conformance
from octavo.testing.report import support_table

MANUAL = Path(__file__).with_name("platforms.md")


def report_of(argument: str) -> dict[str, Any]:
    """The report of a platform, or one that is in a file."""
    if argument.endswith(".json"):
        data: dict[str, Any] = json.loads(Path(argument).read_text(encoding="utf-8"))
        return data
    return conformance(argument).as_data()


def main(arguments: list[str]) -> int:
    """Write the table; the rest of the manual stays."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    table = support_table([report_of(argument) for argument in arguments])
    text = MANUAL.read_text(encoding="utf-8")
    MANUAL.write_text(re.sub(r"(?<=runs the kit\.\n\n).*", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
