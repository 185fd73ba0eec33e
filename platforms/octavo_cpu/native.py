"""The native library: where it lies, whether it fits, and its functions with their argument types."""

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo_cpu.structures import AttentionGeometry

__all__ = ["ABI_VERSION", "DTYPES", "NativeLibrary", "NativeLookup", "find_native"]

ABI_VERSION = 3
ISA_VARIABLE = "OCTAVO_CPU_ISA"
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


_NORM = (*[c_int64] * 5, c_float, c_float, c_int, c_int)
_KERNELS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (*[c_void_p] * 3, *_NORM),
    "layer_norm": (*[c_void_p] * 4, *_NORM),
    "fused_add_rms_norm": (*[c_void_p] * 3, *[c_int64] * 4, c_float, c_float, c_int, c_int),
    "rotary_embedding": (*[c_void_p] * 4, *[c_int64] * 9, c_int, c_int),
    "activation_apply": (c_void_p, c_void_p, c_int64, c_int, c_int),
    "act_and_mul": (c_void_p, c_void_p, *[c_int64] * 3, c_int, c_int),
    "check_batch": (c_void_p,),
    "write_kv": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),
    "attend": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    "pack_dense": (c_void_p, c_void_p, c_void_p, c_int),
    "pack_groups": (*[c_void_p] * 5,),
    "unpack_rows": (c_void_p, c_void_p, c_void_p, c_int64),
    "linear": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int),
    "decoder_step": (c_void_p, c_void_p),
    "decoder_logits": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
    "sample": (c_void_p, c_void_p, *[c_int64] * 3, *[c_void_p] * 6, c_int64),
    "copy_blocks": (*[POINTER(c_void_p)] * 2, c_int64, c_void_p, *[c_int64] * 4),
}


class NativeLibrary:
    """The loaded library. Functions return a status; `check` turns one into an error.

    The functions are attributes without their prefix: `library.rms_norm(...)`. A call releases the GIL.
    """

    rms_norm: Callable[..., int]
    layer_norm: Callable[..., int]
    fused_add_rms_norm: Callable[..., int]
    rotary_embedding: Callable[..., int]
    activation_apply: Callable[..., int]
    act_and_mul: Callable[..., int]
    check_batch: Callable[..., int]
    write_kv: Callable[..., int]
    attend: Callable[..., int]
    copy_blocks: Callable[..., int]
    pack_dense: Callable[..., int]
    pack_groups: Callable[..., int]
    unpack_rows: Callable[..., int]
    linear: Callable[..., int]
    decoder_step: Callable[..., int]
    decoder_logits: Callable[..., int]
    sample: Callable[..., int]

    def __init__(self, path: Path) -> None:
        """Load and check.

        Raises:
            OSError: it cannot be loaded.
            ValueError: it is of another ABI version, or OCTAVO_CPU_ISA names no instruction set.

        """
        self.path = path
        self._library = ctypes.CDLL(str(path))
        version = self._library.octavo_abi_version()
        if version != ABI_VERSION:
            raise ValueError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: install it again")
        for name, argument_types in _KERNELS.items():
            function = getattr(self._library, f"octavo_{name}")
            function.argtypes = argument_types
            function.restype = c_int
            setattr(self, name, function)
        self._library.octavo_set_isa.argtypes = (c_char_p,)
        self._library.octavo_set_num_threads.argtypes = (c_int,)
        self._library.octavo_status_text.argtypes = (c_int,)
        self._library.octavo_block_elements.argtypes = (c_void_p,)
        self._library.octavo_block_elements.restype = c_int64
        self._library.octavo_packed_bytes.argtypes = (c_void_p,)
        self._library.octavo_packed_bytes.restype = c_int64
        self._library.octavo_decoder_workspace.argtypes = (c_void_p, c_int64, c_int64)
        self._library.octavo_decoder_workspace.restype = c_int64
        self._library.octavo_probe_bandwidth.argtypes = (c_void_p, c_int64)
        self._library.octavo_probe_bandwidth.restype = c_double
        self._library.octavo_probe_operations.argtypes = (c_int,)
        self._library.octavo_probe_operations.restype = c_double
        self._library.octavo_status_text.restype = c_char_p
        for name in ("octavo_isa", "octavo_isas_built", "octavo_isas_usable"):
            getattr(self._library, name).restype = c_char_p

    @property
    def isa(self) -> str:
        """The instruction set in use; empty where this processor runs none of those built."""
        return self._text("octavo_isa")

    @property
    def isas_built(self) -> tuple[str, ...]:
        """Those in the library, the widest last."""
        return tuple(filter(None, self._text("octavo_isas_built").split(",")))

    @property
    def isas_usable(self) -> tuple[str, ...]:
        """Those that this processor runs."""
        return tuple(filter(None, self._text("octavo_isas_usable").split(",")))

    def set_isa(self, cap: str) -> None:
        """Use the widest instruction set up to `cap`; not while kernels run."""
        self.check(self._library.octavo_set_isa(cap.encode()), f"instruction set {cap}")

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of a call, the caller included."""
        self.check(self._library.octavo_set_num_threads(num_threads), f"{num_threads} threads")

    @property
    def num_threads(self) -> int:
        """Threads of a call, the caller included."""
        return int(self._library.octavo_num_threads())

    def block_elements(self, geometry: AttentionGeometry) -> int:
        """Elements of one block of one layer."""
        return int(self._library.octavo_block_elements(ctypes.addressof(geometry)))

    def packed_bytes(self, matrix: int) -> int:
        """Bytes that a matrix (the address of its structure) takes when packed."""
        return int(self._library.octavo_packed_bytes(matrix))

    def decoder_workspace(self, decoder: int, num_tokens: int) -> int:
        """Bytes that a step of so many tokens works in, all of which may be asked for."""
        return int(self._library.octavo_decoder_workspace(decoder, num_tokens, num_tokens))

    def probe_bandwidth(self, memory: int, num_bytes: int) -> float:
        """Bytes a second, reading so many at an address over and over on all threads."""
        return float(self._library.octavo_probe_bandwidth(memory, num_bytes))

    def probe_operations(self, format_id: int) -> float:
        """Multiplications and additions a second of products of a format, on all threads."""
        return float(self._library.octavo_probe_operations(format_id))

    def check(self, status: int, what: str) -> None:
        """Raise ValueError for a status that is not 0."""
        if status:
            raise ValueError(f"{what}: {self._library.octavo_status_text(status).decode()}")

    def _text(self, name: str) -> str:
        text: bytes = getattr(self._library, name)()
        return text.decode()


@dataclass(frozen=True)
class NativeLookup:
    """The library, or None and why, in one clause."""

    library: NativeLibrary | None
    reason: str


def find_native(folders: list[Path] | None = None) -> NativeLookup:
    """Look for the library in the package's folders (an editable install has two).

    Raises:
        ValueError: OCTAVO_CPU_ISA names no instruction set of the library.

    """
    name = "liboctavo_cpu.dylib" if sys.platform == "darwin" else "liboctavo_cpu.so"
    if folders is None:
        import octavo_cpu

        folders = [Path(folder) for folder in octavo_cpu.__path__]
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        return NativeLookup(None, f"{name} is not in the package: no C++ compiler worked when Octavo was installed")
    try:
        library = NativeLibrary(path)
    except (OSError, AttributeError, ValueError) as error:
        return NativeLookup(None, f"{path} cannot be used: {error}")
    cap = os.environ.get(ISA_VARIABLE, "")
    if cap and cap not in library.isas_built:
        raise ValueError(f"{ISA_VARIABLE} is {cap!r}; allowed: {', '.join(library.isas_built)}, or unset")
    if not library.isa:
        return NativeLookup(None, f"this processor runs none of {', '.join(library.isas_built)}")
    return NativeLookup(library, f"{path}, {library.isa}")
