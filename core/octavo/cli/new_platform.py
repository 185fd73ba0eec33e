"""`octavo new-platform`: write a plugin that passes level 0 of the kit as it stands, to begin with."""

import argparse
from pathlib import Path

from octavo.cli.options import Formatter
from octavo.cli.platform_template import FILES

__all__ = ["add_parser", "run", "write_platform"]

EXAMPLES = """\
example:
  octavo new-platform mychip
  pip install --editable ./octavo-mychip
  octavo conformance --platform mychip --level 0
  octavo generate demo "The capital of France is" --platform mychip
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "new-platform",
        usage="octavo new-platform NAME [--folder FOLDER]",
        description="Write a package with a platform, one op and a conformance test, which passes level 0 untouched.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="of the platform: lower-case letters, digits, '-' and '_'")
    parser.add_argument("--folder", metavar="FOLDER", help="where to write (default: ./octavo-NAME)")


def run(args: argparse.Namespace) -> int:
    """Write it and say what to do next."""
    folder = write_platform(args.name, Path(args.folder or f"octavo-{args.name}"))
    print(f"written: {folder}; next: pip install --editable {folder}")
    print(f"         octavo conformance --platform {args.name} --level 0")
    return 0


def write_platform(name: str, folder: Path) -> Path:
    """The package for a platform of this name, in a folder that is new or empty.

    Raises:
        ConfigError: the name is none that a platform may have, or the folder holds something.

    """
    import re

    from octavo.errors import ConfigError, shown

    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ConfigError(f"a platform's name is lower-case letters, digits, '-' and '_', got {shown(name)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there and not an empty folder; name another with --folder")
    package = f"octavo_{name.replace('-', '_')}"
    class_name = "".join(part.capitalize() for part in re.split("[-_]", name)) + "Platform"
    for path, content in FILES.items():
        target = folder / path.replace("PACKAGE", package)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            text = content.replace("PACKAGE", package).replace("CLASS", class_name).replace("NAME", name)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    return folder
