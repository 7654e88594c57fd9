"""Whether two tensors of a checkpoint hold the same bytes: the only reading of tensor data before the copying.

Read in blocks, and no further than to the first difference.
"""

from __future__ import annotations

from kconvert.checkpoint.reader import Checkpoint, SourceTensor
from kconvert.errors import CheckpointError

__all__ = ["have_equal_bytes"]

_BLOCK_BYTES = 1 << 20


def have_equal_bytes(checkpoint: Checkpoint, one: SourceTensor, other: SourceTensor) -> bool:
    """Whether dtype, shape and bytes of two tensors are the same.

    Raises:
        CheckpointError: a file cannot be read, or ends early.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    paths = {file.name: file.path for file in checkpoint.files}
    path = paths[one.file]
    try:
        with path.open("rb") as first, paths[other.file].open("rb") as second:
            first.seek(one.offset)
            second.seek(other.offset)
            left = one.size_bytes
            while left:
                size = min(left, _BLOCK_BYTES)
                blocks = first.read(size), second.read(size)
                if min(map(len, blocks)) < size:
                    raise CheckpointError(
                        f"ends early: {one.name!r} or {other.name!r} is not whole",
                        where=str(checkpoint.model_dir),
                        fix="get the file again, and leave it alone while it is converted",
                    )
                if blocks[0] != blocks[1]:
                    return False
                left -= size
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", where=str(error.filename or path)
        ) from error
    return True
