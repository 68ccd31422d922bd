"""Kernels for the CPU. Imported where one is chosen: they need Numba."""
