"""Storage of experience: where records lie (`storage`, `disk`), which of them form windows (`streams`), the ring."""
