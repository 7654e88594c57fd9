"""kconvert beside the released `torch_npu` wheel on a machine without the CANN libraries, where it does not import.

    pip install --no-deps --target SITE torch-npu
    python -m tests.npu.real_wheel SITE

Held: the commands and `load_converted` go on, each with one line that names the cause, and with the exit codes that they have
without the wheel.  It stays out of the environment of the tests: with it there, `import torch` fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import convert, save_tiny

_LOAD = """
import sys, warnings, kconvert
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = kconvert.load_converted(sys.argv[1])
lines = [str(each.message) for each in caught if "torch_npu" in str(each.message)]
kernels = sorted(model.kconvert_report.to_dict()["kernels"])
import json; print(json.dumps({"lines": lines, "kernels": kernels, "report": str(model.kconvert_report)}))
"""


def _run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(site), *sys.path]), "COLUMNS": "80"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command


def main(site: Path) -> int:
    """Run all of it; an assertion fails where something is not held."""
    broken = _run(site, "-c", "import torch")
    assert broken.returncode != 0, "here torch imports beside the wheel: there is nothing to see"
    _say(f"import torch: {broken.stderr.strip().splitlines()[-1]}")
    with tempfile.TemporaryDirectory() as folder:
        source = save_tiny(Path(folder) / "model", "qwen3_moe")
        outputs = {None: Path(folder) / "all", "npu": Path(folder) / "npu"}
        for device, output in outputs.items():
            convert("qwen3-moe-devices", source, output, device=device)
        commands = {
            "doctor": 0,
            "list-kernels": 0,
            f"plan qwen3-moe-devices {source}": 0,
            f"apply qwen3-moe-devices {source} -o {folder}/made --device npu": 0,
            f"verify {outputs['npu']} --source {source}": 0,
        }
        for command, code in commands.items():
            found = _run(site, "-m", "kconvert", *command.split())
            said = [line for line in found.stderr.splitlines() if "torch_npu is installed" in line]
            assert found.returncode == code, f"{command}: {found.returncode}\n{found.stdout}{found.stderr}"
            assert "Traceback" not in found.stdout + found.stderr, f"{command}\n{found.stderr}"
            assert len(said) == (command != "doctor"), f"{command}\n{found.stderr}"
            _say(f"kconvert {command.split()[0]}: {code}, {said[0] if said else 'a row of its table'}")
            if command == "doctor":
                assert "torch_npu" in found.stdout
                assert "CANN" in found.stdout
        listed = json.loads(_run(site, "-m", "kconvert", "list-kernels", "--json", "--device", "npu").stdout)
        assert listed
        assert {row["reason"].partition(" (")[0] for row in listed} == {"torch_npu does not import"}
        for output in outputs.values():
            loaded = _run(site, "-c", _LOAD, str(output))
            assert loaded.returncode == 0, loaded.stderr
            value = json.loads(loaded.stdout.splitlines()[-1])
            assert len(value["lines"]) == 1, value
            assert all(name.startswith("cpu_") for name in value["kernels"]), value
            assert "torch_npu does not" in value["report"], value
            _say(f"load_converted: {value['lines'][0]}; {', '.join(value['kernels'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
