"""What the process of every type needs, imported once in the one that they are forked from."""

from __future__ import annotations

from transformers import GenerationConfig, LlamaForCausalLM

from kconvert.kernels import scan_all_kernels
from tests.sweep.outcome import check_type

__all__ = ["GenerationConfig", "LlamaForCausalLM", "check_type"]

scan_all_kernels()
