"""The BLAS behind the products of Numba's kernels: SciPy's."""

from __future__ import annotations

from typing import NamedTuple

from rl_lab.nn.host_mlp import ONE_THREAD

# Processors, as OpenBLAS calls them, for which it has kernels of small products. For others it packs both matrices anew
# in every call, which pays for many rows only.
_SMALL_PRODUCTS = ("SkylakeX", "Cooperlake", "SapphireRapids")


class CallSize(NamedTuple):
    """What a call should have at the most."""

    rows: int
    multiplications: int


SMALL_CALLS = CallSize(64, ONE_THREAD)
LARGE_CALLS = CallSize(256, 1 << 62)


def fast_calls() -> CallSize:
    """Of which size calls are fast and take one thread. For large ones BLAS would take more, so it is told to."""
    import scipy.linalg  # noqa: F401  # it loads the library
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    libraries = [library for library in found if "numpy.libs" not in library.filepath]  # NumPy brings one of its own
    if not libraries or any(library.architecture in _SMALL_PRODUCTS for library in libraries):
        return SMALL_CALLS
    for library in libraries:
        library.set_num_threads(1)
    return LARGE_CALLS
