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

    There is no thread until `start_thread`. What a job raised is raised again at the next call.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._waiting: deque[Future] = deque()

    @property
    def threaded(self) -> bool:
        return self._executor is not None

    def start_thread(self) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replay")

    def run(self, job: Callable[[], None]) -> None:
        """Do the job now, or after those that wait."""
        if self._executor is None:
            job()
            return
        self._check(MOST_WAITING)
        self._waiting.append(self._executor.submit(job))

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Like `run`, for a job with a result; its error comes with the result."""
        if self._executor is not None:
            return self._executor.submit(job)
        future: Future[T] = Future()
        future.set_result(job())
        return future

    def drain(self) -> None:
        """Wait until all jobs are done."""
        if self._executor is not None:
            self._check(0)
            self._executor.submit(int).result()

    def _check(self, most_waiting: int) -> None:
        while self._waiting and (self._waiting[0].done() or len(self._waiting) > most_waiting):
            self._waiting.popleft().result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
            self._waiting.clear()
