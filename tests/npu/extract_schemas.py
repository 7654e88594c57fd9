"""Write `torch_npu_schemas.json`: the schemas of the operators that the NPU kernels call, from a released wheel.

    pip download --no-deps torch-npu && python -m tests.npu.extract_schemas torch_npu-*.whl

The wheel is read as data: it does not import where the CANN libraries are missing.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

SCHEMAS = Path(__file__).with_name("torch_npu_schemas.json")
_SOURCE = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
OPERATORS = (
    "npu_add_rms_norm",
    "npu_clipped_swiglu",
    "npu_geglu",
    "npu_gemma_rms_norm",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
)
_FUNCTION = re.compile(r"^(?:- |  )func: ((\w+)\(.*)$", re.MULTILINE)


def extract(wheel: Path) -> dict[str, object]:
    """Name and version of the wheel, a schema for each operator, and which have another for their gradient."""
    _, version, *_ = wheel.name.split("-")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(_SOURCE).decode()
    every = {name: schema for schema, name in _FUNCTION.findall(text)}
    found = {name: every[name] for name in OPERATORS if name in every}
    with_gradient = [name for name in sorted(found) if {f"{name}_backward", f"{name}_grad"} & every.keys()]
    missing = sorted(set(OPERATORS) - found.keys())
    if missing:
        raise SystemExit(f"{wheel.name} has no {', '.join(missing)}")
    return {
        "package": "torch-npu",
        "version": version,
        "file": _SOURCE,
        "with_gradient": with_gradient,
        "schemas": dict(sorted(found.items())),
    }


if __name__ == "__main__":
    SCHEMAS.write_text(json.dumps(extract(Path(sys.argv[1])), indent=1) + "\n")
