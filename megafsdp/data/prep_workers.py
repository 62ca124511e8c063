"""Tokenize texts in worker processes, in the order of the texts.

One process reads and writes, the workers tokenize. Batches of texts go to the workers in turn and
come back in the same order, one for each worker at a time, so that the results are those of one
process and memory does not grow with the corpus::

    reader    batch 0  1  |  2  |  3  |  4  |  5        writes the tokens of 0, 1, 2 ...
    worker 0        [ 0  ][ 2        ][ 4        ]
    worker 1           [ 1     ][ 3        ][ 5 ...

Each worker has a pipe of its own, with no end in a third process: a process that ends, even if it
is killed, closes the pipe, and the process at the other end notices at once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext

import numpy as np
from numpy.typing import NDArray

from megafsdp.data.tokenizer import Tokenizer, load_tokenizer
from megafsdp.errors import DataError, expected

Tokens = NDArray[np.integer]

# Characters of a batch: large beside the cost of a message, small beside memory.
_BATCH_LENGTH = 1 << 18


def tokenize(
    texts: Iterable[str], tokenizer: Tokenizer, spec: str, *, num_workers: int
) -> Generator[tuple[str, Tokens], None, None]:
    """Yield each text with its tokens, in order; close the iterator to end the workers.

    Args:
        texts: Read as many batches ahead of what is yielded as there are workers.
        tokenizer: Used in this process if there is one worker.
        spec: What each worker loads its tokenizer by.
        num_workers: Processes that tokenize; 1 starts none.

    Raises:
        DataError: A worker ended before its time. Errors of the texts and of tokenizers pass
            through.
    """
    if num_workers == 1:
        yield from ((text, tokenizer.encode_array(text)) for text in texts)
        return
    context = _context()
    with ExitStack() as started:
        workers = [started.enter_context(_Worker(context, spec)) for _ in range(num_workers)]
        turns = itertools.cycle(workers)
        for batch, worker in zip(_batches(texts), turns, strict=False):
            # Receive before more is sent: if both processes send, neither of them receives.
            oldest = worker.receive()
            worker.send(batch)
            yield from oldest
        # The worker whose turn is next has the oldest batch.
        for worker in itertools.islice(turns, num_workers):
            yield from worker.receive()


class _Worker:
    """A process that tokenizes one batch at a time; a context manager that ends it."""

    def __init__(self, context: ForkServerContext | SpawnContext, spec: str) -> None:
        self.batch: list[str] = []
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_work, args=(other_end, spec), daemon=True)
        self._process.start()
        other_end.close()

    def send(self, batch: list[str]) -> None:
        """Hand over a batch."""
        self.batch = batch
        try:
            self._pipe.send(batch)
        except OSError as error:
            raise self._ended(error) from error

    def receive(self) -> Iterable[tuple[str, Tokens]]:
        """Wait for the tokens of the batch that was sent, if there is one."""
        batch, self.batch = self.batch, []
        if not batch:
            return []
        try:
            result: list[Tokens] | Exception = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended(error) from error
        if isinstance(result, Exception):
            raise result
        return zip(batch, result, strict=True)

    def _ended(self, error: Exception) -> DataError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return DataError(
            expected(
                "worker processes that live until all texts are tokenized",
                f"one that ended by {how}",
                where=f"prep, which has written nothing ({type(error).__name__})",
                hint="Look into the system's log for a want of memory, and use fewer workers",
            )
        )

    def __enter__(self) -> _Worker:
        """Return the worker."""
        return self

    def __exit__(self, *unused: object) -> None:
        """End the process, whatever it does."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        # Many empty documents are a batch too.
        length += len(text) + 1
        if length >= _BATCH_LENGTH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _context() -> ForkServerContext | SpawnContext:
    """Return how workers start: forked by a server process without threads, if there is one.

    This process has threads, whose locks a fork would copy in any state.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Import the package, which takes seconds, once for all workers.
    context.set_forkserver_preload([__name__])
    return context


def _work(pipe: Connection, spec: str) -> None:
    """Tokenize what comes through a pipe, until it is closed."""
    # A terminal interrupts all processes; the one that reads ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = load_tokenizer(spec)
    while True:
        try:
            batch: list[str] = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result: object = [tokenizer.encode_array(text) for text in batch]
        except Exception as error:
            result = error
        try:
            pipe.send(result)
        except OSError:
            return
