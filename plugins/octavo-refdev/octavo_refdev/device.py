"""The double of an accelerator: memory that the host cannot reach, in pure Python, as torch's PrivateUse1.

Its tensors carry addresses at which no process can have memory, so whoever reads one as a host pointer crashes.
Their bytes lie in host tensors that only this file finds. Each operator lands in `Device._run`, which lets torch's
host kernel work on those bytes. Copies across, and waits of the host for a value of the device, are counted.
"""

import functools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "refdev"
CAPACITY = 4 << 30  # bytes
FIRST_ADDRESS = 0x7EF0_DE50_0000_0000  # canonical neither on x86-64 nor on AArch64
PAGE = 4096
HOST_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Operators of geometry alone: their host kernels touch no bytes and may have the device's tensors themselves.
GEOMETRY = ("view", "as_strided", "_reshape_alias", "set_.source_Storage_storage_offset")
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::_unique2")


def missing() -> str:
    """What this torch lacks, or nothing; looks and touches nothing."""
    needed = (
        (backend_registration, "_setup_privateuseone_for_python_backend"),
        (torch._C, "_construct_storage_from_data_pointer"),
        (getattr(torch._C, "_acc", None), "create_empty_tensor"),
        (torch.library.Library, "fallback"),
    )
    return ", ".join(name for owner, name in needed if not hasattr(owner, name))


@functools.cache
def open_device() -> "Device":
    """The one device of the process. RuntimeError where another backend has torch's only place for one."""
    holder = torch._C._get_privateuse1_backend_name()
    if holder != "privateuseone":
        raise RuntimeError(f"torch has room for one backend of another make in a process, and {holder!r} has it")
    return Device()


class Device:
    """Memory and operators. `strict` makes every wait of the host for a value of the device an error."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # to_device, to_host, sync
        self.strict = False
        self._bytes_at: dict[int, torch.Tensor] = {}
        self._freed: deque[int] = deque()  # storages die in any thread, at any time
        self._next, self._used = FIRST_ADDRESS, 0
        self._lock = threading.Lock()
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        everything.fallback(self._run, "PrivateUse1")
        aten.impl("_copy_from", self._copy, "PrivateUse1")
        for name in GEOMETRY:
            aten.impl(name, functools.partial(_on_host_kernel, name), "PrivateUse1")
        self._libraries = everything, aten  # their end would undo the registration

    def used(self) -> int:
        """Bytes that live storages take."""
        with self._lock:
            while self._freed:
                self._used -= self._bytes_at.pop(self._freed.popleft()).nbytes
            return self._used

    def _take_in(self, host: torch.Tensor) -> torch.Tensor:
        """The device's tensor of the bytes of a host tensor, which nobody else may hold."""
        content = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
        free = CAPACITY - self.used()
        if content.nbytes > free:
            raise torch.OutOfMemoryError(f"{NAME}: {content.nbytes} bytes asked for, {free} of {CAPACITY} are free")
        with self._lock:
            address = self._next
            self._next += -(-max(content.nbytes, 1) // PAGE) * PAGE
            self._bytes_at[address] = content
            self._used += content.nbytes
        place = torch.device(NAME, 0)
        storage = torch._C._construct_storage_from_data_pointer(address, place, content.nbytes)
        weakref.finalize(storage, self._freed.append, address).atexit = False
        tensor = torch._C._acc.create_empty_tensor((0,), host.dtype)
        return _point(tensor, storage, host)

    def _content(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor of ours as a host kernel sees them, same geometry, same memory; others as they are."""
        if not _is_ours(tensor):
            return tensor
        storage = self._bytes_at[tensor.untyped_storage().data_ptr()].untyped_storage()
        geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """The only way across."""
        self.counts["to_device"] += not _is_ours(source)
        self.counts["to_host"] += not _is_ours(target)
        self._content(target).copy_(self._content(source))
        return target

    def _run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Any operator that has no kernel of its own: the host's, where the bytes lie."""
        if op._schema.name in READS:
            self.counts["sync"] += 1
            if self.strict:
                raise RuntimeError(f"{op} makes the host wait for a value of {NAME}")
        entered: list[tuple[torch.Tensor, torch.Tensor]] = []  # ours, and the host kernel's view of it

        def enter(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu") if x.type == NAME else x
            if not isinstance(x, torch.Tensor):
                return x
            if not _is_ours(x) and x.dim():  # torch lets host scalars mix with any device
                raise RuntimeError(f"{op} got tensors on {NAME} and on {x.device}")
            entered.append((x, self._content(x)))
            return entered[-1][1]

        def leave(y: Any) -> Any:
            if not isinstance(y, torch.Tensor):
                return y
            for ours, content in entered:
                if y is content:  # in place; an `out` may have grown
                    return ours if y.shape == ours.shape else _point(ours, self._take_in(y.clone()), y)
                if y.untyped_storage()._cdata == content.untyped_storage()._cdata:
                    return ours.as_strided(y.shape, y.stride(), y.storage_offset())
            return self._take_in(y)

        # A boxed call brings plain numbers, also where the schema says Tensor.
        wanted = [isinstance(argument.type, torch.TensorType) for argument in op._schema.arguments]
        pairs = zip(args, wanted, strict=False)
        args = tuple(torch.tensor(x) if tensor and isinstance(x, int | float) else x for x, tensor in pairs)
        return _map(leave, op(*_map(enter, args), **{name: _map(enter, x) for name, x in kwargs.items()}))


def _is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == NAME


def _map(fn: Callable[[Any], Any], x: Any) -> Any:
    return type(x)(_map(fn, item) for item in x) if isinstance(x, list | tuple) else fn(x)


def _point(tensor: torch.Tensor, memory: Any, like: torch.Tensor) -> torch.Tensor:
    """Let a tensor of ours show what `like` shows, in other memory."""
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    geometry = like.storage_offset(), like.shape, like.stride()
    return _on_host_kernel("set_.source_Storage_storage_offset", tensor, storage, *geometry)


def _on_host_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return op.redispatch(HOST_KERNEL, *args, **kwargs)
