"""Kernels for a GPU. Imported where one is chosen: they need `triton`."""
