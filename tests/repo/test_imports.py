"""Imports point one way, platforms know the contract alone, and importing does no work."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo.sources import ROOT, text_of, tracked

# From the ground up. A module may import its own part and the parts on lower lines.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("structured_output",),
    ("config", "sampling_params", "pooling_params", "gguf_file"),
    ("contract",),
    ("hardware",),
    ("cache", "model", "text"),
    ("scheduler",),
    ("executor",),
    ("engine",),
    ("testing", "server"),
    ("cli",),
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}


def imports_of(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of all modules that a source imports, at the top or within a function.

    `from octavo.model import files` may name a module or an attribute; both give octavo.model.files.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def faults_in_core(part: str, imported: Iterator[str]) -> list[str]:
    """The imports that a part of the core may not have."""
    faults = []
    for name in imported:
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if root.startswith("octavo_"):
            faults.append(f"{name}: core never names a platform")
        elif root == "octavo" and target in HEIGHT and target != part:
            if part == "contract" and target != "errors":
                faults.append(f"{name}: the contract imports errors alone")
            elif HEIGHT[target] >= HEIGHT[part]:
                faults.append(f"{name}: {target} is not below {part}")
    return faults


def package_of(path: Path, root: str) -> tuple[str, ...]:
    return path.relative_to(root).parts[:-1]


@pytest.mark.parametrize("path", tracked((".py",), "core/octavo"), ids=str)
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to("core/octavo")
    part = relative.parts[0].removesuffix(".py")
    if part == "__init__":
        return  # the public face names what lies on every layer
    assert part in HEIGHT, f"{part} is on no layer: give it its place in LAYERS"
    assert faults_in_core(part, imports_of(text_of(path), package_of(path, "core"))) == []


def test_platforms_import_the_contract_alone() -> None:
    """Ours, and those in plugins/, whose packages lie one folder deeper; their tests may use the engine."""
    for root, depth in (("platforms", 1), ("plugins", 2)):
        for path in tracked((".py",), root):
            own = path.parts[depth]
            if own.startswith("octavo_"):
                package = path.parts[depth:-1]
                foreign = [name for name in imports_of(text_of(path), package) if is_foreign(name, own)]
                assert foreign == [], f"{path} imports more of octavo than its contract"


def is_foreign(name: str, own: str) -> bool:
    """Whether a platform that is the package `own` may not import this."""
    root = name.partition(".")[0]
    return root.startswith("octavo") and root != own and not name.startswith("octavo.contract.")


@pytest.mark.parametrize(
    ("part", "source", "num_faults"),
    [
        ("cache", "from octavo.scheduler.request import Request", 1),
        ("cache", "def f():\n    import octavo.engine.llm", 1),
        ("cache", "from octavo import engine", 1),
        ("cache", "from ..executor import worker", 1),
        ("cache", "from octavo.model.spec import x", 1),
        ("contract", "from octavo.config import EngineConfig", 1),
        ("contract", "from octavo.errors import PlatformError", 0),
        ("engine", "import octavo_cpu.plugin", 1),
        ("engine", "import torch, octavo.executor.base", 0),
        ("cache", "from octavo.cache.pool import Pool", 0),
        ("cli", "from octavo import __version__", 0),
    ],
)
def test_the_rule_itself(part: str, source: str, num_faults: int) -> None:
    assert len(faults_in_core(part, imports_of(source, ("octavo", part)))) == num_faults


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("octavo.contract.Platform", False),
        ("octavo_mine.kernels", False),
        ("torch.nn", False),
        ("octavo.engine.llm.LLM", True),
        ("octavo.LLM", True),
        ("octavo_cpu.ops", True),
    ],
)
def test_the_rule_of_platforms_itself(name: str, foreign: bool) -> None:
    assert is_foreign(name, "octavo_mine") == foreign


@pytest.mark.parametrize(
    "module", ["octavo", "octavo.config", "octavo.sampling_params", "octavo.pooling_params", "octavo.cli.main"]
)
def test_light_modules_do_not_import_torch(module: str) -> None:
    run(f"import sys, {module}\nassert not {{'torch', 'transformers', 'numpy'}} & set(sys.modules), 'heavy'")


def test_help_does_not_import_torch() -> None:
    run(
        "import sys\nfrom octavo.cli.main import main\n"
        "for command in ([], ['generate'], ['chat']):\n"
        "    try:\n        main([*command, '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )


def test_importing_does_no_work() -> None:
    """No plugin loaded, no thread started, no handler of logs or signals installed, nothing of torch changed."""
    run(
        "import importlib, logging, pkgutil, signal, sys, threading, torch\n"
        "def state():\n"
        "    return (threading.active_count(), list(logging.root.handlers), logging.root.level,\n"
        "            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.get_num_threads(),\n"
        "            torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed())\n"
        "before = state()\n"
        "import octavo\n"
        "names = [m.name for m in pkgutil.walk_packages(octavo.__path__, 'octavo.')]\n"
        "assert len(names) > 20, names\n"
        "for name in names:\n    importlib.import_module(name)\n"
        "assert state() == before\n"
        "loaded = [name for name in sys.modules if name.startswith(('octavo_', 'transformers'))]\n"
        "assert not loaded, loaded"
    )


def run(script: str) -> None:
    """Run a script in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
