"""How `kconvert verify --level bytes` is shown."""

from __future__ import annotations

from kconvert.cli.output import format_bytes, print_folded, print_table
from kconvert.parity import BytesLevel, How, TensorGroup

__all__ = ["bytes_verdict", "show_bytes"]

_MOST_LINES = 20
_TITLES = {
    How.SOURCE: "Bytes, beside the source",
    How.DIGESTS: "Bytes, beside the digests of the conversion",
    How.BOTH: "Bytes, beside the source and the digests of the conversion",
    How.STRUCTURE: "Names, dtypes and shapes, beside the manifest",
}
_KINDS = {"copied": "tensors as they were", "joined": "tensors put together", "computed": "tensors computed"}


def show_bytes(level: BytesLevel) -> None:
    """The tensors by the way they came about, and everything that does not hold, the worst first."""
    rows = [
        (_KINDS[group.kind], f"{group.num_tensors}", format_bytes(group.size_bytes), _cell(group))
        for group in level.groups
    ]
    files = f"{level.num_wrong_files} WRONG" if level.num_wrong_files else "equal"
    rows.append(("other files, by digest", str(level.num_files), "", files))
    print_table(_TITLES[level.how], ("", "n", "size", "bytes"), rows, right=("n", "size"), whole=("", "bytes"))
    for failure in level.found[:_MOST_LINES]:
        print_folded(f"{failure.where}: {failure.what}", first="- ", hang=2)
    if len(level.found) > _MOST_LINES:
        print_folded(f"and {len(level.found) - _MOST_LINES} more; kconvert_parity.json has all")


def _cell(group: TensorGroup) -> str:
    if group.num_wrong:
        return f"{group.num_wrong} WRONG"
    if not group.num_compared:
        return "not compared"
    if group.num_compared < group.num_tensors:
        return f"{group.num_tensors - group.num_compared} not compared"
    return "equal"


def bytes_verdict(level: BytesLevel) -> str:
    """What was shown, where nothing is wrong."""
    size, compared = format_bytes(level.num_compared_bytes), sum(group.num_compared for group in level.groups)
    if level.how is How.STRUCTURE:
        return f"{level.num_tensors} tensors have the names, dtypes and shapes that the manifest says"
    if level.how is How.DIGESTS:
        return f"the bytes of {compared} tensors ({size}) are those that were written"
    others = f"; {level.num_tensors - compared} were not compared" if compared < level.num_tensors else ""
    return f"the bytes of {compared} tensors ({size}) are those of the source{others}"
