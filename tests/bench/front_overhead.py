"""What a streamed token costs the front process: CPU time over tokens, with an engine that costs nothing.

    python tests/bench/front_overhead.py [--streams 32] [--tokens 500] [--profile FILE]

The front is a process of its own, as `octavo serve` runs it; its engine is `doubles.echo_child`. The clients are
plain sockets of this process. CPU time is that of the whole front process, user and system, admission included.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

PROMPT = "The quick brown fox jumps over the lazy dog and says what it has seen on its way. "
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}


def front(folder: str, profile: str | None) -> None:
    """The process that is measured: a server until SIGTERM."""
    import cProfile
    import logging

    from octavo.config import EngineConfig
    from octavo.engine import supervisor
    from octavo.server.options import ServerOptions
    from octavo.server.run import Address, serve

    supervisor.CHILD_MODULE = "doubles.echo_child"
    logging.basicConfig(level="INFO", format="%(message)s")
    config = EngineConfig.of(model=folder, max_num_seqs=256)
    serving = serve(
        config, ServerOptions(served_model_names=("echo",)), Address(port=0), stall_timeout=60, drain_seconds=1
    )
    if profile is None:
        asyncio.run(serving)
        return
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(asyncio.run, serving)
    profiler.dump_stats(profile)


async def stream(address: tuple[str, int], path: str, body: bytes) -> tuple[int, int]:
    """Stream one request to its end; events and bytes that came."""
    reader, writer = await asyncio.open_connection(*address)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    data = bytearray()
    while not data.endswith(b"0\r\n\r\n"):
        more = await reader.read(1 << 16)
        assert more, bytes(data[-1000:])
        data += more
    writer.close()
    assert b"200 OK" in data[:100], bytes(data[:1000])
    return data.count(b"data: {"), len(data)


def kernel_seconds(pid: int) -> float:
    """Of a process's CPU time, that spent in the kernel: most of it sends, each a write of one stream."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) / os.sysconf("SC_CLK_TCK")  # stime, field 15 of proc(5)


async def measure(address: tuple[str, int], path: str, num_streams: int, num_tokens: int, pid: int) -> str:
    """One line of figures."""
    clock = (~pid << 3) | 2  # the CPU clock of another process: clock_getcpuclockid(3)
    body = json.dumps({**BODIES[path], "max_tokens": num_tokens, "stream": True, "temperature": 0}).encode()
    cpu, kernel, began = time.clock_gettime(clock), kernel_seconds(pid), time.monotonic()
    found = await asyncio.gather(*(stream(address, path, body) for _ in range(num_streams)))
    cpu, seconds = time.clock_gettime(clock) - cpu, time.monotonic() - began
    kernel = kernel_seconds(pid) - kernel
    total = num_streams * num_tokens
    events, size = sum(events for events, _ in found), sum(size for _, size in found)
    return (
        f"{path:22} {1e6 * cpu / total:6.1f} us of CPU a token, {1e6 * kernel / total:.0f} of them the kernel's; "
        f"{num_streams} streams of {num_tokens}, {events / total:.3f} events and {size / total:.0f} bytes a token, "
        f"{total / seconds:.0f} tokens a second"
    )


def main() -> None:
    """Start a front, load it, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.01, help="between the engine's steps")
    parser.add_argument("--profile", metavar="FILE", help="write cProfile's figures of the front (which slow it)")
    parser.add_argument("--front", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.front:
        front(args.front, args.profile)
        return

    from doubles.echo_child import STEP_VARIABLE
    from doubles.tiny_llm import write_tiny_llm

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_llm(Path(folder), max_position_embeddings=8192)
        command = [sys.executable, __file__, "--front", folder, *(["--profile", args.profile] if args.profile else [])]
        paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, STEP_VARIABLE: str(args.step_seconds), "PYTHONPATH": paths}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stderr is not None
                for line in server.stderr:
                    if found := re.search(r"ready on http://([\d.]+):(\d+)", line):
                        break
                else:
                    sys.exit("the front did not start")
                address = (found[1], int(found[2]))
                for path in BODIES:
                    asyncio.run(measure(address, path, args.streams, 20, server.pid))  # to warm up
                for _ in range(args.rounds):
                    for path in BODIES:
                        print(asyncio.run(measure(address, path, args.streams, args.tokens, server.pid)), flush=True)
            finally:
                server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
