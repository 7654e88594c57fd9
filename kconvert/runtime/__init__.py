"""The runtime: converted directories as transformers models."""

from kconvert.runtime.loader import load_converted

__all__ = ["load_converted"]
