"""What the process of every class needs, imported once in the one that they are forked from."""

from __future__ import annotations

from transformers import GenerationConfig, LlamaForCausalLM

from kconvert.kernels import scan_all_kernels
from tests.bake.outcome import check_subject

__all__ = ["GenerationConfig", "LlamaForCausalLM", "check_subject"]

scan_all_kernels()
