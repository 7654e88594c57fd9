"""Gathered tensors, through a whole rewrite, against numpy: any item size, any order, any block size, bounded memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconvert.errors import CheckpointError
from kconvert.rewrite import Cast, Extent, Gather, GatherPiece, Job, OutputFile, gather, rewrite
from kconvert.transforms import Arrangement, Dim, Piece, whole
from kconvert.transforms import arrangement as ops
from tests.rewrite.conftest import no_copy_threads
from tests.support import indices_of

ROOT = Path(__file__).parents[2]
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Stored:
    """Source tensors in files of their own, each behind some other bytes, and the arrangement that is made of them."""

    folder: Path
    tensors: Mapping[str, Array]
    made: Arrangement
    casts: Mapping[str, Cast]
    item_bytes: int

    def gather(self) -> Gather:
        pieces = tuple(
            GatherPiece(self.folder / piece.source, self.offset(piece.source), piece, self.casts.get(piece.source))
            for piece in self.made.pieces
        )
        return Gather(self.made.size, self.item_bytes, pieces)

    def offset(self, name: str) -> int:
        """No multiple of an item size."""
        return 3 + 2 * list(self.tensors).index(name)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in self.tensors.items():
            (self.folder / name).write_bytes(b"x" * self.offset(name) + tensor.tobytes() + b"after")

    def expected(self) -> bytes:
        """By numpy and torch alone, element by element."""
        found = np.zeros(self.made.size, dtype=f"V{self.item_bytes}")
        for piece in self.made.pieces:
            source, target = indices_of(piece.numbers())
            found[target] = self.converted(piece.source)[source]
        return found.tobytes()

    def converted(self, name: str) -> Array:
        data = self.tensors[name].tobytes()
        if name in self.casts:
            dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            cast = self.casts[name]
            values = torch.frombuffer(bytearray(data), dtype=dtypes[cast.source]).to(dtypes[cast.target])
            data = values.view(torch.uint8).numpy().tobytes()
        return np.frombuffer(data, dtype=f"V{self.item_bytes}")


def job_of(stored: Stored) -> Job:
    """The tensor between two extents, as a file has it."""
    first = stored.folder / next(iter(stored.tensors))
    extents = (Extent(first, 0, 3), stored.gather(), Extent(first, 1, 2))
    return Job((OutputFile("out", b"head", extents),), (), (("kconvert_manifest.json", b"{}"),))


def check(stored: Stored, output: Path, *, workers: int = 2) -> None:
    stored.write()
    seen: list[int] = []
    job = job_of(stored)
    rewrite(job, output, workers=workers, on_progress=seen.append)
    assert (output / "out").read_bytes() == b"headxxx" + stored.expected() + b"xx"
    assert sum(seen) == job.size_bytes == 4 + 3 + stored.made.size * stored.item_bytes + 2 + 2


def numbered(shape: Sequence[int], item_bytes: int, seed: int) -> Array:
    """Random items."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (*shape, item_bytes), dtype=np.uint8).view(f"V{item_bytes}").reshape(shape)


def turned() -> Arrangement:
    """Stacked, joined, transposed and dealt out: gate and up of three experts, [3, 5, 14]."""
    gate, up = (ops.stack([whole(f"{n}.{name}", (7, 5)) for n in range(3)]) for name in ("gate", "up"))
    return ops.interleave(ops.transpose(ops.concatenate([gate, up], 1), 1, 2), 7, 2)


SIX = {f"{n}.{name}": (7, 5) for name in ("gate", "up") for n in range(3)}
MADE: Mapping[str, tuple[Arrangement, Mapping[str, tuple[int, ...]]]] = {
    "transposed": (ops.transpose(whole("a", (23, 17)), 0, 1), {"a": (23, 17)}),
    "two axes of three": (ops.transpose(whole("a", (3, 7, 11)), 0, 2), {"a": (3, 7, 11)}),
    "dealt out": (ops.interleave(whole("a", (6, 50)), 2, 1), {"a": (6, 50)}),
    "half of what is dealt out": (ops.chunk(ops.interleave(whole("a", (6, 50)), 2, 1), 2, 1)[1], {"a": (6, 50)}),
    "joined columns": (ops.concatenate([whole("a", (9, 2)), whole("b", (9, 5))], 1), {"a": (9, 2), "b": (9, 5)}),
    "experts": (turned(), SIX),
    "a few columns": (ops.narrow(whole("a", (40, 100)), 1, 60, 3), {"a": (40, 100)}),
    "one element": (ops.narrow(ops.narrow(whole("a", (4, 4)), 0, 2, 1), 1, 1, 1), {"a": (4, 4)}),
    "all as it is": (whole("a", (5, 5)), {"a": (5, 5)}),
    "with an empty part": (
        ops.concatenate([whole("none", (9, 0)), ops.transpose(whole("a", (4, 9)), 0, 1)], 1),
        {"none": (9, 0), "a": (4, 9)},
    ),
}


@pytest.mark.parametrize("block_bytes", [8 << 20, 100, 8])
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("name", list(MADE))
def test_any_order_of_any_items_in_any_blocks(
    name: str, item_bytes: int, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks may be smaller than a row, and of a single element."""
    monkeypatch.setattr(gather, "BLOCK_BYTES", block_bytes)
    made, shapes = MADE[name]
    tensors = {source: numbered(shape, item_bytes, seed) for seed, (source, shape) in enumerate(shapes.items())}
    check(Stored(tmp_path / "in", tensors, made, {}, item_bytes), tmp_path / "out")


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", list(MADE))
def test_tiles_of_any_size(name: str, item_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of a few elements are turned in tiles of three by three."""
    monkeypatch.setattr(gather, "_LEAST_TURNED", 2)
    monkeypatch.setattr(gather, "_TILE_BYTES", 3 * item_bytes)
    made, shapes = MADE[name]
    tensors = {source: numbered(shape, item_bytes, seed) for seed, (source, shape) in enumerate(shapes.items())}
    check(Stored(tmp_path / "in", tensors, made, {}, item_bytes), tmp_path / "out")


@pytest.mark.parametrize(("rows", "columns"), [(300, 700), (31, 700), (32, 32), (33, 1030)])
def test_a_matrix_that_is_turned(rows: int, columns: int, tmp_path: Path) -> None:
    """Larger than a tile and no multiple of it; with a dtype of its own, and between other rows."""
    made = ops.concatenate([ops.transpose(whole(name, (2, rows, columns)), 1, 2) for name in ("a", "b")], 2)
    tensors = {"a": numbered((2, rows, columns), 2, 1), "b": numbered((2, rows, columns), 4, 2)}
    casts = {"b": Cast("F32", "BF16")}
    tensors["b"] = np.random.default_rng(3).standard_normal((2, rows, columns)).astype(np.float32)
    check(Stored(tmp_path / "in", tensors, made, casts, 2), tmp_path / "out")


def test_a_block_ends_where_a_piece_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of 60 elements in blocks of 130; one that does not fit is cut between its rows of 12."""
    experts = [ops.transpose(whole(f"e{number}", (12, 5)), 0, 1) for number in range(5)]
    stored = Stored(Path("in"), {f"e{n}": numbered((12, 5), 1, n) for n in range(5)}, ops.concatenate(experts), {}, 1)
    for most, ends in ((130, [120, 240, 300]), (60, [60, 120, 180, 240, 300]), (30, None)):
        monkeypatch.setattr(gather, "BLOCK_BYTES", most)
        blocks = list(gather.blocks_of(stored.gather()))
        found = [block.end for block in blocks]
        assert [block.start for block in blocks] == [0, *found[:-1]]
        assert found == (ends or [end for first in range(0, 300, 60) for end in (first + 24, first + 48, first + 60)])


DEALT = ops.interleave(ops.interleave(whole("a", (4, 6)), 2, 0), 2, 1)
MORE: Mapping[str, tuple[Arrangement, Mapping[str, tuple[int, ...]]]] = {
    "dealt out twice, behind a column": (
        ops.concatenate([whole("s", (4, 1)), DEALT], 1),
        {"a": (4, 6), "s": (4, 1)},
    ),
    "dealt out twice, before a row": (
        ops.transpose(ops.concatenate([DEALT, whole("s", (1, 6))]), 0, 1),
        {"a": (4, 6), "s": (1, 6)},
    ),
    "four axes": (ops.permute(whole("a", (2, 3, 4, 5)), (3, 1, 0, 2)), {"a": (2, 3, 4, 5)}),
}


@pytest.mark.parametrize("name", [*MADE, *MORE])
def test_blocks_of_every_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a block begins and ends, and whatever is read at a time."""
    made, shapes = {**MADE, **MORE}[name]
    tensors = {source: numbered(shape, 2, seed) for seed, (source, shape) in enumerate(shapes.items())}
    stored = Stored(Path("in"), tensors, made, {}, 2)
    files = {
        stored.folder / source: b"x" * stored.offset(source) + tensor.tobytes() for source, tensor in tensors.items()
    }

    def read(path: Path, offset: int, size: int) -> memoryview:
        assert offset + size <= len(files[path])
        return memoryview(bytearray(files[path][offset : offset + size]))

    expected, full = stored.expected(), stored.gather()
    for size in (*range(1, min(made.size, 120)), made.size, made.size + 1):
        monkeypatch.setattr(gather, "BLOCK_BYTES", 2 * size)
        for blocks in (
            list(gather.blocks_of(full)),
            [gather.Block(full, at, min(at + size, made.size)) for at in range(0, made.size, size)],
        ):
            assert b"".join(bytes(gather.fill_block(block, read)) for block in blocks) == expected, size


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_arrangement(data: st.DataObject) -> None:
    made = whole("a", (4, 6))
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 6)}
    for number in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["join", "stack", "turn", "deal", "cut"]))
        axis = data.draw(st.integers(0, len(made.shape) - 1))
        size = made.shape[axis]
        if kind == "join":
            name, shape = f"s{number}", (*made.shape[:axis], data.draw(st.integers(0, 3)), *made.shape[axis + 1 :])
            shapes[name] = shape
            made = ops.concatenate([whole(name, shape), made], axis)
        elif kind == "stack" and len(made.shape) < 4:
            shapes[f"s{number}"] = made.shape
            made = ops.stack([made, whole(f"s{number}", made.shape)], axis)
        elif kind == "turn":
            made = ops.permute(made, data.draw(st.permutations(range(len(made.shape)))))
        elif kind == "deal" and size % 2 == 0 and size:
            made = ops.interleave(made, 2, axis)
        elif kind == "cut" and size > 1:
            made = ops.narrow(made, axis, 1, size - 1)
    used = {piece.source for piece in made.pieces}
    item_bytes = data.draw(st.sampled_from([1, 2, 4, 8]))
    tensors = {name: numbered(shape, item_bytes, n) for n, (name, shape) in enumerate(shapes.items()) if name in used}
    block_bytes = data.draw(st.sampled_from([8, 24, 56, 200, 1 << 20]))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "BLOCK_BYTES", block_bytes)
        check(Stored(Path(folder) / "in", tensors, made, {}, item_bytes), Path(folder) / "out", workers=1)


@pytest.mark.parametrize("block_bytes", [8 << 20, 56])
@pytest.mark.parametrize("target", ["F32", "F16", "BF16"])
def test_items_of_other_dtypes_are_converted_on_the_way(
    target: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "BLOCK_BYTES", block_bytes)
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    generator = torch.Generator().manual_seed(0)
    tensors, casts = {}, {}
    for dtype in dtypes:
        made = torch.randn(7, 5, generator=generator).to(dtypes[dtype])
        tensors[dtype] = made.view(torch.uint8).numpy().view(f"V{made.element_size()}").reshape(7, 5)
        if dtype != target:
            casts[dtype] = Cast(dtype, target)
    arrangement = ops.transpose(ops.concatenate([whole(dtype, (7, 5)) for dtype in dtypes], 1), 0, 1)
    item_bytes = torch.empty(0, dtype=dtypes[target]).element_size()
    check(Stored(tmp_path / "in", tensors, arrangement, casts, item_bytes), tmp_path / "out")


# --- what is read ---------------------------------------------------------------------------------------


class Reads:
    """How often, and how much, is read by `preadv`, but for the few bytes that are copied before and behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        real = os.preadv

        def note(fd: int, buffers: Sequence[Any], offset: int) -> int:
            count = real(fd, buffers, offset)
            if count > 3:
                self.sizes.append(count)
            return count

        monkeypatch.setattr(os, "preadv", note)


def big(folder: Path, made: Arrangement) -> Stored:
    return Stored(folder, {"a": numbered((1000, 1000), 4, 0)}, made, {}, 4)


def test_a_transpose_that_fits_reads_its_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = big(tmp_path / "in", ops.transpose(whole("a", (1000, 1000)), 0, 1))
    reads = Reads(monkeypatch)
    check(stored, tmp_path / "out")
    assert reads.sizes == [4_000_000]


def test_a_transpose_in_blocks_reads_no_more_than_four_times_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, block_bytes in enumerate((1_000_000, 400_000, 40_000)):
        with monkeypatch.context() as patch:
            patch.setattr(gather, "BLOCK_BYTES", block_bytes)
            reads = Reads(patch)
            check(big(tmp_path / "in", ops.transpose(whole("a", (1000, 1000)), 0, 1)), tmp_path / f"out{place}")
            assert max(reads.sizes) <= block_bytes
            assert 4_000_000 <= sum(reads.sizes) <= 16_000_000


def test_a_few_columns_are_read_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    check(big(tmp_path / "in", ops.narrow(whole("a", (1000, 1000)), 1, 500, 10)), tmp_path / "out")
    assert reads.sizes == [40] * 1000


def test_half_of_the_columns_are_read_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    half, _ = ops.chunk(ops.interleave(whole("a", (1000, 1000)), 2, 1), 2, 1)
    check(big(tmp_path / "in", half), tmp_path / "out")
    assert sum(reads.sizes) == 4_000_000 - 4  # all but the last element
    assert len(reads.sizes) == 1


# --- what goes wrong ------------------------------------------------------------------------------------


def test_a_source_that_is_too_short(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "in", {"a": numbered((9, 7), 2, 0)}, ops.transpose(whole("a", (9, 7)), 0, 1), {}, 2)
    stored.write()
    os.truncate(stored.folder / "a", 3 + 2 * 63 - 1)
    with pytest.raises(CheckpointError, match="in/a: is too short: 129 bytes needed, 128 found"):
        rewrite(job_of(stored), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_source_cut_short_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "BLOCK_BYTES", 400)
    stored = Stored(tmp_path / "in", {"a": numbered((50, 70), 2, 0)}, ops.transpose(whole("a", (50, 70)), 0, 1), {}, 2)
    stored.write()
    read = os.preadv

    def read_then_cut(*args: Any) -> int:
        count = read(*args)
        os.truncate(stored.folder / "a", 5)
        return count

    monkeypatch.setattr(os, "preadv", read_then_cut)
    with pytest.raises(CheckpointError, match=r"in/a: ends early: no data at byte \d+, .* size is now 5"):
        rewrite(job_of(stored), tmp_path / "out", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert no_copy_threads()


def test_a_source_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path / "in", {"a": numbered((9, 7), 2, 0)}, ops.transpose(whole("a", (9, 7)), 0, 1), {}, 2)
    stored.write()

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"in/a: cannot be read at byte \d"):
        rewrite(job_of(stored), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_reads_and_writes_that_stop_early_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:5], offset))
    made, shapes = MADE["experts"]
    tensors = {source: numbered(shape, 2, seed) for seed, (source, shape) in enumerate(shapes.items())}
    check(Stored(tmp_path / "in", tensors, made, {}, 2), tmp_path / "out")


@pytest.mark.parametrize(
    ("size", "piece", "said"),
    [
        (6, Piece("a", 0, 0, (Dim(5, 1, 1),)), "the pieces of a tensor do not add up"),
        (4, Piece("a", 0, 0, (Dim(5, 1, 1),)), "bad piece of 'a'"),
        (5, Piece("a", 0, 1, (Dim(5, 1, 1),)), "bad piece of 'a'"),
    ],
)
def test_pieces_that_do_not_fill_the_tensor(size: int, piece: Piece, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Gather(size, 2, (GatherPiece(Path("f"), 0, piece),))
    with pytest.raises(CheckpointError, match="bad piece of 'a'"):
        Gather(5, 2, (GatherPiece(Path("f"), -1, Piece("a", 0, 0, (Dim(5, 1, 1),))),))


CHILD = """
import resource, sys
from pathlib import Path
import numpy
from kconvert.rewrite import Gather, GatherPiece, Job, OutputFile, rewrite
from kconvert.transforms import whole
from kconvert.transforms.arrangement import transpose
source, output = Path(sys.argv[1]), Path(sys.argv[2])
made = transpose(whole("a", (5000, 10000)), 0, 1)
gather = Gather(made.size, 4, tuple(GatherPiece(source, 0, piece) for piece in made.pieces))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rewrite(Job((OutputFile("f", b"", (gather,)),), (), ()), output, workers=2)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
assert "torch" not in sys.modules
"""


def test_memory_is_bounded_and_no_torch_is_needed(tmp_path: Path) -> None:
    """200 MB, transposed as a whole."""
    values = np.arange(50_000_000, dtype=np.uint32).reshape(5000, 10000)
    values.tofile(tmp_path / "source")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "source"), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024, f"{done.stdout} KiB more than before"
    found = np.fromfile(tmp_path / "out" / "f", dtype=np.uint32).reshape(10000, 5000)
    assert (found == values.T).all()


def test_places_that_no_piece_fills_are_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces in one place, as a damaged manifest may have them: what is left out is never what was in memory."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 0x55, dtype))
    path = tmp_path / "source"
    path.write_bytes(b"abcdefgh")
    piece = GatherPiece(path, 0, Piece("t", 0, 0, (Dim(2, 2, 2),)))
    job = Job((OutputFile("same", b"", (Gather(4, 1, (piece, piece)),)),), (), (("kconvert_manifest.json", b"{}"),))
    rewrite(job, tmp_path / "out")
    assert (tmp_path / "out" / "same").read_bytes() == b"a\0c\0"
