"""All that is there for speed alone. Plain PyTorch stands elsewhere, and is what these must compute."""
