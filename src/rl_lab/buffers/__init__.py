"""Storage of experience: where records lie (`storage`, `disk`), which of them form windows (`streams`), and the ring itself."""
