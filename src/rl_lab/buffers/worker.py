"""Runs jobs in the order they were handed in: at once, or in one background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MOST_WAITING = 8  # jobs; each may hold staged records


class OrderedWorker:
    """One queue, strictly in order, so that results are the same with the thread as without it.

    There is no thread until `start_thread`. Once a job has failed no other is done, and every call raises its error:
    the data behind a failed write must not be used, let alone saved.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._waiting: deque[Future] = deque()
        self._error: BaseException | None = None

    @property
    def threaded(self) -> bool:
        return self._executor is not None

    def start_thread(self) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay")

    def run(self, job: Callable[[], object]) -> None:
        """Do the job now, or let the thread do it after those that wait."""
        if self._executor is None:
            self._do(job)
        else:
            self.submit(job)

    def call(self, job: Callable[[], T]) -> T:
        """The job's result, once those that wait are done."""
        return self._do(job) if self._executor is None else self.submit(job).result()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """A result for later, from the thread."""
        assert self._executor is not None
        self._raise_error()
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft().result()
        self._waiting.append(self._executor.submit(self._do, job))
        return self._waiting[-1]

    def drain(self) -> None:
        """Wait until all jobs are done."""
        while self._waiting:
            self._waiting.popleft().result()
        self._raise_error()

    def _do(self, job: Callable[[], T]) -> T:
        self._raise_error()
        try:
            return job()
        except BaseException as error:
            self._error = error
            raise

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None
            self._waiting.clear()
