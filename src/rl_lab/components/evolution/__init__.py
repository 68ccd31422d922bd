"""Evolution strategies over a flat parameter vector, and the trials of their populations."""
