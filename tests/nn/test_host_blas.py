"""How many multiplications BLAS is given at once, and with how many threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import threadpoolctl

from rl_lab.nn.host_blas import LARGE_CALLS, SMALL_CALLS, fast_calls


class Library:
    """Stands for a BLAS that the process has loaded."""

    def __init__(self, filepath: str, architecture: str) -> None:
        self.filepath, self.architecture, self.threads = filepath, architecture, 8

    def set_num_threads(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture
def loaded(monkeypatch):
    """Gives the process these libraries."""

    def load(*libraries: Library) -> None:
        controller = SimpleNamespace(select=lambda **_: SimpleNamespace(lib_controllers=list(libraries)))
        monkeypatch.setattr(threadpoolctl, "ThreadpoolController", lambda: controller)

    return load


def test_small_products_are_cut_where_blas_has_kernels_for_them(loaded):
    """They are so few that it takes one thread anyhow: its threads stay what they are."""
    own = Library("site-packages/scipy.libs/libscipy_openblas.so", "SkylakeX")
    loaded(own)
    assert (fast_calls(), own.threads) == (SMALL_CALLS, 8)


def test_many_rows_at_once_repay_the_packing_elsewhere(loaded):
    """With one thread, of SciPy's library alone."""
    numpys = Library("site-packages/numpy.libs/libscipy_openblas64_.so", "Haswell")
    own = Library("site-packages/scipy.libs/libscipy_openblas.so", "Haswell")
    loaded(numpys, own)
    assert fast_calls() == LARGE_CALLS
    assert (numpys.threads, own.threads) == (8, 1)


def test_another_blas_gets_small_products(loaded):
    """How many threads it takes for large ones is not known."""
    loaded()
    assert fast_calls() == SMALL_CALLS


def test_products_of_this_process_take_one_thread():
    """As it is: either they are small, or the library has one thread."""
    size = fast_calls()
    found = threadpoolctl.ThreadpoolController().select(internal_api="openblas").lib_controllers
    threads = [library.num_threads for library in found if "numpy.libs" not in library.filepath]
    assert size == SMALL_CALLS or threads == [1] * len(threads)
