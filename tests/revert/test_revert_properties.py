"""`revert(apply(x)) == x`, file by file and byte for byte, over sources of any form and ops of any kind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, assume, given, settings

from kconvert.errors import CheckpointError
from tests.revert.checks import check_given_back
from tests.revert.generated import Case, cases, convert_case, write_case


@contextmanager
def small_runs(short_run: int, block: int) -> Iterator[None]:
    """Tensors of a few bytes in as many runs, blocks and pieces as those of gigabytes; the disk is not waited for."""
    with (
        mock.patch("os.fsync"),
        mock.patch("kconvert.rewrite.extents._SHORT_RUN_BYTES", short_run),
        mock.patch("kconvert.rewrite.gather.BLOCK_BYTES", block),
        mock.patch("kconvert.rewrite.tasks.PIECE_BYTES", block),
    ):
        yield


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_reverting_what_was_converted_gives_the_source(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder, small_runs(*case.runs):
        source = write_case(Path(folder) / "source", case)
        try:
            converted = convert_case(source, Path(folder) / "converted", case)
        except CheckpointError as error:
            assume("begin inside of a byte" not in str(error))
            raise
        check_given_back(source, converted, Path(folder) / "back", left_out=["pytorch_model.bin"])
