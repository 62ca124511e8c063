"""torchrun's agent in forked processes: launchers of workers that fail, of one machine or two.

The agent is the one of ``torch.distributed.run``, with workers that are forked. They have imported
everything, so a restart takes a tenth of a second.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_LIMIT_S = 120.0


@dataclass(frozen=True)
class Launch:
    """What a launcher starts.

    Attributes:
        worker: Called in each worker.
        log: File of all output.
        num_ranks: Workers of a launcher.
        num_nodes: Launchers.
        max_restarts: How often workers are started anew.
        port: Where the launchers meet.
    """

    worker: Callable[[], object]
    log: Path
    num_ranks: int = 2
    num_nodes: int = 1
    max_restarts: int = 0
    port: int = 0

    def start(self, *, is_host: bool = True) -> int:
        """Fork a launcher in a session of its own; return its process id."""
        process_id = os.fork()
        if process_id == 0:
            try:
                os.setsid()
                self._run(is_host)
            finally:
                os._exit(99)
        return process_id

    def _run(self, is_host: bool) -> None:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if self.num_nodes > 1:
            # As docs/cluster.md says: with torch's shared store a machine that comes back waits for
            # an address which the others published before its time.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        config = LaunchConfig(
            min_nodes=self.num_nodes,
            max_nodes=self.num_nodes,
            nproc_per_node=self.num_ranks,
            logs_specs=DefaultLogsSpecs(),
            run_id="test",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{self.port or free_port()}",
            rdzv_configs={"is_host": is_host, "keep_alive_interval": 1, "timeout": 60},
            max_restarts=self.max_restarts,
            monitor_interval=0.05,
            start_method="fork",
            local_addr="127.0.0.1",
        )

        def worker() -> None:
            # The agent asks for a name, which a partial function has not.
            self.worker()

        code = 0
        try:
            elastic_launch(config, worker)()
        except Exception as error:
            print(error, flush=True)
            code = 1
        # The test process's own hooks are not the launcher's.
        os._exit(code)


def free_port() -> int:
    """Return a port that nothing listens to; each job needs another one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def leave_process_group() -> None:
    """Close the process group of the pool's rank, so that forked processes are plain ones."""
    if dist.is_initialized():
        dist.destroy_process_group()


def workers(launcher: int) -> list[int]:
    """Return the process ids of a launcher's workers, in order of their ranks."""
    path = Path(f"/proc/{launcher}/task/{launcher}/children")
    return sorted(int(child) for child in path.read_text().split()) if path.exists() else []


def kill_node(launcher: int) -> None:
    """Kill a launcher and its workers at once, as a machine that loses its power, and reap it."""
    for process_id in [launcher, *workers(launcher)]:
        os.kill(process_id, signal.SIGKILL)
    os.waitpid(launcher, 0)


def ended(launcher: int) -> int:
    """Wait for a launcher and return its exit code."""
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        process_id, status = os.waitpid(launcher, os.WNOHANG)
        if process_id:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    kill_node(launcher)
    raise AssertionError(f"no end within {_LIMIT_S:g} s")


def until(is_true: Callable[[], Any], what: str) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)
