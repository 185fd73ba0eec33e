"""What the repository's rules are checked on."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "octavo"


@cache
def tracked(suffixes: tuple[str, ...] = (), under: str = "") -> tuple[Path, ...]:
    """Files that git knows and that are there, relative to the root, with one of the suffixes (any, if none)."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", under or "."], cwd=ROOT, check=True, capture_output=True)
    paths = (Path(name) for name in listed.stdout.decode().split("\0") if name)
    return tuple(path for path in paths if (ROOT / path).is_file() and (not suffixes or path.suffix in suffixes))


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
