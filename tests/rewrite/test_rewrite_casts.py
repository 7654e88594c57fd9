"""Float values in another dtype: torch's bits, in blocks, and everything else of a rewrite as for copies."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kconvert.errors import CheckpointError, PreflightError
from kconvert.rewrite import Cast, Extent, Job, OutputFile, copying, reading, rewrite, tasks
from kconvert.rewrite.durable import write_at
from kconvert.rewrite.reading import OpenFile
from tests.rewrite.conftest import let_the_kernel_copy, no_copy_threads

ROOT = Path(__file__).parents[2]
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BITS: dict[str, Any] = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
MANTISSA = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}
PAIRS = [(source, target) for source in TORCH for target in ("F32", "F16", "BF16") if source != target]

Array = np.ndarray[Any, np.dtype[Any]]


def floats(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=TORCH[dtype])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def check_values(bits: Array, source: str, target: str) -> None:
    """Bit for bit what `.to()` gives; a NaN has to be a NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns of overflows
        found = bytes(Cast(source, target).convert(memoryview(bits.tobytes())))
    expected = floats(bits.tobytes(), source).to(TORCH[target])
    is_nan = expected.isnan().numpy()
    assert (floats(found, target).isnan().numpy() == is_nan).all()
    ours, theirs = (np.frombuffer(data, BITS[target]) for data in (found, bytes_of(expected)))
    wrong = (ours != theirs) & ~is_nan
    assert [(hex(bits[n]), hex(ours[n]), hex(theirs[n])) for n in np.flatnonzero(wrong)[:5]] == []


def halfway(source: str, target: str) -> Array:
    """Every value of a half dtype, its neighbour halfway to the next one, and what lies just beside that, as `source`."""
    with np.errstate(all="ignore"):
        steps = floats(np.arange(65536, dtype=np.uint16).tobytes(), target).to(TORCH[source])
        bits = np.frombuffer(bytes_of(steps), BITS[source])
        middle = bits + BITS[source](1 << (MANTISSA[source] - MANTISSA[target] - 1))
    return np.concatenate([bits, middle - BITS[source](1), middle, middle + BITS[source](1)])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_bits_of_torch(source: str, target: str) -> None:
    rng = np.random.default_rng(3)
    if BITS[source] is np.uint16:
        check_values(np.arange(65536, dtype=np.uint16), source, target)
        return
    dtype = BITS[source]
    check_values(rng.integers(0, np.iinfo(dtype).max, 300_000, dtype=dtype, endpoint=True), source, target)
    spread = rng.standard_normal(300_000) * 10.0 ** rng.integers(-48, 40, 300_000)
    with np.errstate(all="ignore"):
        check_values(spread.astype("f8" if source == "F64" else "f4").view(dtype), source, target)
    if target != "F32":
        check_values(halfway(source, target), source, target)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PAIRS), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=64))
@example(("F32", "BF16"), [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80000000, 0x7F800000])
@example(("F32", "F16"), [0x477FEFFF, 0x477FF000, 0xC77FF000, 0x33000000, 0x33000001, 0x387FE000, 0x00000001])
@example(("F64", "F32"), [0x3FF0000010000000, 0x47EFFFFFF0000000, 0x36A0000000000000, 0x3690000000000000, 1])
@example(("F64", "F16"), [0x3FF0020000000001, 0x40EFFDFFFFFFFFFF, 0xFFF0000000000000])
@example(("F64", "BF16"), [0x3FF0100000000001, 0x3FF0100000000000, 0x7FEFFFFFFFFFFFFF])
def test_any_bits(pair: tuple[str, str], values: list[int]) -> None:
    source, target = pair
    mask = np.iinfo(BITS[source]).max
    check_values(np.array([value & mask for value in values], dtype=BITS[source]), source, target)


@pytest.mark.parametrize(
    ("source", "target", "bits", "expected"),
    [
        ("F32", "BF16", [0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0x7F810000], [0x7FC0, 0x7FC0, 0xFFC0, 0x7F81]),
        ("F32", "F16", [0x7F800001, 0xFF802000, 0x7FFFFFFF], [0x7E00, 0xFC01, 0x7FFF]),
        ("BF16", "F16", [0x7F81, 0xFFC1, 0x7FFF], [0x7C08, 0xFE08, 0x7FF8]),
        ("BF16", "F32", [0x7F81, 0xFFC1], [0x7F810000, 0xFFC10000]),
        ("F16", "F32", [0x7C01, 0xFE02], [0x7F802000, 0xFFC04000]),
        ("F16", "BF16", [0x7C01, 0xFE02], [0x7FC0, 0x7FC0]),
        ("F64", "F32", [0x7FF0000000000001, 0xFFF8000020000000], [0x7FC00000, 0xFFC00001]),
        ("F64", "F16", [0x7FF0000000000001, 0xFFF8040000000000], [0x7E00, 0xFE01]),
        ("F64", "BF16", [0x7FF0000000000001, 0xFFF8000020000000], [0x7FC0, 0x7FC0]),
    ],
)
def test_a_nan_has_the_same_bits_wherever_it_stands(
    source: str, target: str, bits: list[int], expected: list[int]
) -> None:
    for repeat in (1, 1000):
        data = np.array(bits * repeat, dtype=BITS[source]).tobytes()
        found = np.frombuffer(Cast(source, target).convert(memoryview(data)), BITS[target])
        assert list(map(hex, found)) == list(map(hex, expected)) * repeat


@pytest.mark.parametrize("half", ["F16", "BF16"])
def test_every_half_comes_back_from_float32(half: str) -> None:
    data = np.arange(1 << 16, dtype=np.uint16).tobytes()
    there = bytes(Cast(half, "F32").convert(memoryview(data)))
    assert bytes(Cast("F32", half).convert(memoryview(there))) == data


@pytest.mark.parametrize(
    ("source", "target"), [("F32", "F32"), ("F32", "F64"), ("F8_E4M3", "BF16"), ("I32", "F32"), ("BF16", "F8_E5M2")]
)
def test_other_pairs_are_refused(source: str, target: str) -> None:
    with pytest.raises(ValueError, match=f"no cast from {source} to {target}"):
        Cast(source, target)


def test_a_part_of_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bad extent: offset 0, size 6"):
        Extent(tmp_path / "a", 0, 6, Cast("F32", "BF16"))


def values(dtype: str, count: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes_of(torch.randn(count, generator=generator).to(TORCH[dtype]))


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Job, bytes]:
    """A file whose extents are copied, converted, empty, and at odd offsets, and what it has to hold."""
    folder = tmp_path / "source"
    folder.mkdir()
    wide, narrow, long = values("F32", 20_001, 1), values("BF16", 10_007, 2), values("F64", 3_003, 3)
    (folder / "a").write_bytes(b"odd" + wide + narrow)
    (folder / "b").write_bytes(long)
    a, b = folder / "a", folder / "b"
    extents = (
        Extent(a, 0, 3),
        Extent(a, 3, len(wide), Cast("F32", "BF16")),
        Extent(a, 3 + len(wide), len(narrow)),
        Extent(a, 3, 0, Cast("F32", "F16")),
        Extent(a, 3 + len(wide), len(narrow), Cast("BF16", "F32")),
        Extent(b, 8, len(long) - 8, Cast("F64", "F16")),
        Extent(b, 0, 8),
    )
    content = b"".join(
        [
            b"pre",
            b"odd",
            bytes_of(floats(wide, "F32").bfloat16()),
            narrow,
            bytes_of(floats(narrow, "BF16").float()),
            bytes_of(floats(long, "F64")[1:].half()),
            long[:8],
        ]
    )
    return Job((OutputFile("out", b"pre", extents),), (), (("kconvert_manifest.json", b"{}"),)), content


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_content_and_progress(
    mixed: tuple[Job, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, small: bool
) -> None:
    if small:  # no multiple of any item size
        monkeypatch.setattr(tasks, "PIECE_BYTES", 7_003)
        monkeypatch.setattr(reading, "BUFFER_BYTES", 1_001)
    job, content = mixed
    seen: list[int] = []
    rewrite(job, tmp_path / "new", workers=workers, on_progress=seen.append)
    assert (tmp_path / "new" / "out").read_bytes() == content
    assert sum(seen) == job.size_bytes == len(content) + 2


def test_reads_and_writes_that_stop_early_go_on(
    mixed: tuple[Job, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:4099]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:4093], offset))
    job, content = mixed
    rewrite(job, tmp_path / "new")
    assert (tmp_path / "new" / "out").read_bytes() == content


def test_what_is_copied_beside_may_go_through_the_kernel(
    mixed: tuple[Job, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_kernel_copy(monkeypatch)
    real, copied = os.copy_file_range, []

    def count(*args: Any) -> int:
        copied.append(args[2])
        return real(*args)

    monkeypatch.setattr(os, "copy_file_range", count)
    rewrite(mixed[0], tmp_path / "new")
    assert sorted(copied) == [3, 8, 20_014]


def test_neighbours_that_are_converted_are_not_merged(tmp_path: Path) -> None:
    path, cast = tmp_path / "a", Cast("F32", "BF16")
    plain = [Extent(path, 0, 8), Extent(path, 8, 8), Extent(path, 32, 4), Extent(path, 36, 4)]
    converted = [Extent(path, 16, 8, cast), Extent(path, 24, 8, cast)]
    assert list(tasks.merged([*plain[:2], *converted, *plain[2:]])) == [
        Extent(path, 0, 16),
        *converted,
        Extent(path, 32, 8),
    ]


def test_pieces_are_cut_between_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PIECE_BYTES", 10)
    source, target = OpenFile(tmp_path / "s", 3), OpenFile(tmp_path / "t", 4)
    extents = [Extent(source.path, 100, 20, Cast("F32", "BF16")), Extent(source.path, 120, 4)]
    pieces = list(tasks.cut(extents, {source.path: source}, target, 5))
    wanted = [(100, 5, 8), (108, 9, 8), (116, 13, 4)]
    assert pieces == [
        *(
            copying.WholeTask(Extent(source.path, start, size, Cast("F32", "BF16")), target, to)
            for start, to, size in wanted
        ),
        copying.Piece(source, 120, target, 15, 4),
    ]


def failing(code: int) -> Callable[..., int]:
    def fail(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_disk_full(mixed: tuple[Job, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "write_at", failing(errno.ENOSPC))  # `execute` has its own name for the prefixes
    with pytest.raises(PreflightError, match="disk is full"):
        rewrite(mixed[0], tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert no_copy_threads()


def test_a_source_cut_short_meanwhile(
    mixed: tuple[Job, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source" / "a"
    extents = (Extent(source, 3, 80_004, Cast("F32", "F16")),)
    monkeypatch.setattr(reading, "BUFFER_BYTES", 4_000)
    job = Job((OutputFile("out", b"p", extents),), (), ())
    write = os.pwrite

    def write_then_cut(*args: Any) -> int:
        os.truncate(source, 5)
        return write(*args)

    monkeypatch.setattr(os, "pwrite", write_then_cut)
    with pytest.raises(CheckpointError, match=r"source/a: ends early: no data at byte \d+, .* size is now 5"):
        rewrite(job, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_cannot_be_read(
    mixed: tuple[Job, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(CheckpointError, match="cannot be read at byte"):
        rewrite(mixed[0], tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_ctrl_c_ends_within_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece, so that only the stop between blocks can end it early."""
    (tmp_path / "source").write_bytes(bytes(4_000_000))
    monkeypatch.setattr(reading, "BUFFER_BYTES", 4_000)
    written = []
    real = write_at

    def note(fd: int, data: bytes | memoryview, offset: int) -> None:
        written.append(offset)
        real(fd, data, offset)
        time.sleep(0.002)  # all of it would take seconds

    monkeypatch.setattr(copying, "write_at", note)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    job = Job((OutputFile("out", b"", (Extent(tmp_path / "source", 0, 4_000_000, Cast("F32", "F16")),)),), (), ())
    with pytest.raises(KeyboardInterrupt):
        rewrite(job, tmp_path / "new", workers=1, on_progress=interrupt)
    assert len(written) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert no_copy_threads()


CHILD = """
import resource, sys
from pathlib import Path
from kconvert.rewrite import Cast, Extent, Job, OutputFile, rewrite
source, output = Path(sys.argv[1]), Path(sys.argv[2])
size = source.stat().st_size
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rewrite(Job((OutputFile("f", b"", (Extent(source, 0, size, Cast("F32", "BF16")),)),), (), ()), output)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
assert "torch" not in sys.modules
"""


def test_memory_is_bounded_without_torch(tmp_path: Path) -> None:
    with (tmp_path / "source").open("wb") as file:
        file.truncate(200_000_000)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "source"), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 * 1024, f"{done.stdout} KiB more than before"
    assert (tmp_path / "out" / "f").stat().st_size == 100_000_000
