"""The BLAS behind the products of Numba's kernels: SciPy's."""

from __future__ import annotations

from rl_lab.nn.host_mlp import ONE_THREAD

# Processors, as OpenBLAS calls them, for which it has kernels of small products. For others it packs both matrices anew
# in every call, which pays for many rows only.
_SMALL_PRODUCTS = ("SkylakeX", "Cooperlake", "SapphireRapids")


def multiplications_at_once() -> int:
    """How many a call should have at the most, so that it is fast and BLAS takes one thread for it."""
    import scipy.linalg  # noqa: F401  # it loads the library
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    libraries = [library for library in found if "numpy.libs" not in library.filepath]  # NumPy brings one of its own
    if not libraries or any(library.architecture in _SMALL_PRODUCTS for library in libraries):
        return ONE_THREAD
    for library in libraries:
        library.set_num_threads(1)
    return 1 << 62
