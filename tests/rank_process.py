"""The far side of the rank pools: the nursery process and the rank processes it forks.

The nursery is forked once, before any test runs, while the parent has one thread and no CUDA
context; it has imported what the test modules import and does nothing but fork ranks and bury them.
A rank runs one call after another, each in a process group of its own, and answers with the value
or the traceback.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)

from megafsdp.device.memory import set_poison

ENVIRONMENT_PREFIX = "MEGAFSDP_"
# Of functions and of closures that no name leads to. Looked for here, before the collector is told
# to leave alone what there is.
_DTENSOR_CACHES = [
    found
    for found in gc.get_objects()
    if type(found) is functools._lru_cache_wrapper
    and found.__module__.startswith("torch.distributed.tensor")
]


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as the pool sends it to each of its ranks.

    Attributes:
        function: Pickled function.
        arguments: Pickled positional arguments.
        backend: Backend string of the process group.
        store_path: File of the process group's store, fresh for each call.
        timeout_s: Limit after which collectives of the call fail by themselves.
        environment: The caller's ``MEGAFSDP_*`` variables, poison switch included.
        warning_filters: The caller's ``warnings.filters``: a warning is an error in a rank too.
    """

    function: bytes
    arguments: bytes
    backend: str
    store_path: str
    timeout_s: float
    environment: dict[str, str]
    warning_filters: list[Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says after a call.

    Attributes:
        value: Pickled return value; None if the call failed.
        failure: Formatted traceback; None if the call succeeded.
        failed_at_s: Time of the failure on the machine's clock, to tell cause from effect.
    """

    value: bytes | None = None
    failure: str | None = None
    failed_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ForkRanks:
    """Ask the nursery for the ranks of one pool; it answers with their process ids."""

    world_size: int
    address: str
    log_directory: str


@dataclass(frozen=True, slots=True)
class BuryRanks:
    """Ask the nursery to kill ranks and wait for them; it answers with one exit code each."""

    process_ids: tuple[int, ...]


def caller_environment() -> dict[str, str]:
    """Return the variables of this process that its ranks must share."""
    return {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT_PREFIX)}


def serve_nursery(requests: Connection) -> NoReturn:
    """Fork and bury ranks on request until the parent goes away.

    Args:
        requests: Receives :class:`ForkRanks` and :class:`BuryRanks`; closed by the parent's death.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive: set[int] = set()
    try:
        while True:
            request = requests.recv()
            if isinstance(request, ForkRanks):
                process_ids = [_fork_rank(request, rank) for rank in range(request.world_size)]
                alive.update(process_ids)
                requests.send(process_ids)
            else:
                alive.difference_update(request.process_ids)
                requests.send([_bury(process_id) for process_id in request.process_ids])
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    for process_id in alive:
        _bury(process_id)
    os._exit(0)


def _bury(process_id: int) -> int:
    # The id cannot have been given to another process: only this waitpid frees it.
    os.kill(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def _fork_rank(request: ForkRanks, rank: int) -> int:
    process_id = os.fork()
    if process_id == 0:
        try:
            _serve_rank(request, rank)
        finally:
            os._exit(1)
    return process_id


def _serve_rank(request: ForkRanks, rank: int) -> NoReturn:
    log = os.open(f"{request.log_directory}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log)
    torch.set_num_threads(1)
    # The pools of all pytest processes share the cores: no rank has one to wait on awake.
    os.environ["LOCAL_WORLD_SIZE"] = str(len(os.sched_getaffinity(0)) + 1)
    if sys.platform == "linux":
        # The host name may resolve to an address that this machine cannot reach.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Client(request.address, family="AF_UNIX") as pool:
        pool.send(rank)
        try:
            while True:
                call = pickle.loads(pool.recv_bytes())
                pool.send(_answer(call, rank, request.world_size))
        except EOFError:
            os._exit(0)


def _answer(call: Call, rank: int, world_size: int) -> Answer:
    try:
        # The group of the call before stays open until here, when all its ranks have answered:
        # closing it earlier fails ranks that still communicate, and hides who failed first.
        _forget_last_call()
        _adopt_caller_state(call)
        _init_process_group(call, rank, world_size)
        function: Callable[..., object] = pickle.loads(call.function)
        value = pickle.dumps(function(*pickle.loads(call.arguments)))
        return Answer(value=value)
    except BaseException:
        return Answer(failure=traceback.format_exc(), failed_at_s=time.monotonic())


def _forget_last_call() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor caches specs by equality, and with them meshes whose groups are gone: their threads
    # would poll closed sockets for ever.
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cache in _DTENSOR_CACHES:
        cache.cache_clear()
    dtensor_random._rng_tracker = None
    gc.collect()
    if _num_threads() == 1:
        # No group is alive that a later collection could free. Modules that calls have imported
        # are, and need not be looked at again between any two calls.
        gc.freeze()


def _num_threads() -> int:
    """Return the number of this process's threads, those of groups included; 0 if unknown."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


def _adopt_caller_state(call: Call) -> None:
    for name in caller_environment():
        del os.environ[name]
    os.environ.update(call.environment)
    # Read anew: fixtures of modules call ranks before the fixture that poisons a test's memory.
    set_poison(os.environ.get("MEGAFSDP_POISON") == "1")
    warnings.resetwarnings()
    # The list is public, the compiled patterns in it fit no public function.
    cast("list[Any]", warnings.filters).extend(call.warning_filters)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _init_process_group(call: Call, rank: int, world_size: int) -> None:
    if "nccl" in call.backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        call.backend,
        store=dist.FileStore(call.store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=call.timeout_s),
    )
