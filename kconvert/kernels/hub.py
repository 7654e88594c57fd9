"""Kernel packages on the Hub: which commit, which files of it, and the transfer into a private copy.  Imports none.

`version: N` is the branch `vN`, as for the `kernels` library, and a plain reference means version 1.  A `kernels.lock`
decides the commit; an entry that asks for something else than the lock says is refused.  huggingface_hub transfers,
into its cache and with its settings (HF_HUB_OFFLINE, HF_ENDPOINT, KERNELS_CACHE, tokens).  A file of the cache that is
no longer what the Hub gave is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from kconvert.errors import KernelRefusedError, RecipeError, one_line
from kconvert.kernels.packages import PackageCopy, copy_package
from kconvert.kernels.variants import has_kernels_library, is_pure_python, runs_here

# the base of every network error, of whichever HTTP library huggingface_hub uses
_HTTP_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")

__all__ = ["HubPackage", "fetch_package", "find_lock", "is_trusted_owner", "wanted_revision"]

LOCK_NAME = "kernels.lock"
_TRUSTED_OWNERS = frozenset({"kernels-community"})
_VERSION = re.compile(r"v([1-9][0-9]*)")
_MAX_BYTES = 256 * 1024 * 1024
_NO_BYTE_CODE = ["*.pyc", "*.pyo", "**/__pycache__/**"]


def is_trusted_owner(repo: str) -> bool:
    """Whether packages that were just downloaded from `owner/repo` are trusted without being named."""
    return repo.partition("/")[0] in _TRUSTED_OWNERS


def find_lock(folders: Iterable[Path]) -> Path | None:
    """The first `kernels.lock` in these folders."""
    return next((path for folder in folders if (path := folder / LOCK_NAME).is_file()), None)


def wanted_revision(*, version: int | None, revision: str | None) -> str:
    """The branch, tag or commit that an entry asks for: `v1` where it does not say."""
    return revision if revision is not None else f"v{version if version is not None else 1}"


@dataclass(frozen=True)
class HubPackage:
    """A package as `fetch_package` brought it: its private copy, the commit, and the folder to read it in."""

    copy: PackageCopy
    commit: str
    source: Path


def fetch_package(
    repo: str, package_id: str, *, version: int | None = None, revision: str | None = None, lock: Path | None = None
) -> HubPackage:
    """Bring a package into a private copy; nothing of it is imported.

    Copied is the whole `build/` folder, because it may be loaded on another machine.  Where that is over 256 MiB, it is
    every pure-Python variant, and of the compiled ones only the best for this machine.

    Args:
        repo: `owner/repo`.
        package_id: as in the recipe.
        version: the kernel's version; 1 where `revision` is None too.
        revision: a branch, tag or commit.
        lock: the `kernels.lock` that holds here.

    Raises:
        RecipeError: no such repository, version or revision, or the lock says otherwise.
        KernelRefusedError: the `kernels` library is missing, the Hub cannot be reached, or a file is not as it was.
    """
    where = f"kernel package {package_id!r}"
    if not has_kernels_library():
        raise KernelRefusedError(
            f"{where} is on the Hub, and the kernels library is not installed", fix="run pip install 'kconvert[hub]'"
        )
    asked = wanted_revision(version=version, revision=revision)
    if lock is not None:
        asked = _locked_commit(lock, repo, asked, where)
    hub = _Repository(HfApi(library_name="kconvert"), repo)
    with _one_line(hub, asked, where):
        found = hub.download(asked, ["build/*/metadata.json"])
        names = sorted({path.parent.name for path in found.glob("build/*/metadata.json")})
        if not names:
            raise RecipeError(
                f"{where} has no build/<variant>/metadata.json at {asked}", fix="name a kernel repository of the Hub"
            )
        taken = hub.download_variants(found.name, names)
    return HubPackage(_private_copy(found, taken, package_id), found.name, found)


@dataclass(frozen=True)
class _Repository:
    """A kernel repository, and how it is asked for."""

    api: HfApi
    repo: str

    def download(self, revision: str, patterns: Sequence[str]) -> Path:
        """The snapshot folder with these files; out of the cache where the Hub cannot be reached."""
        return Path(
            self.api.snapshot_download(
                self.repo,
                repo_type="kernel",
                revision=revision,
                cache_dir=os.environ.get("KERNELS_CACHE"),
                allow_patterns=list(patterns),
                ignore_patterns=_NO_BYTE_CODE,
            )
        )

    def download_variants(self, commit: str, names: Sequence[str]) -> Sequence[str]:
        """Bring the variants that are copied, and say which."""
        best = runs_here(names)
        fewer = [name for name in names if is_pure_python(name) or name == best]
        size_bytes = self._size_bytes(commit)
        if size_bytes is not None:
            taken = names if size_bytes <= _MAX_BYTES else fewer
            self.download(commit, [f"build/{name}/*" for name in taken])
            return taken
        try:  # only the cache can be asked: it holds what was brought before
            self.download(commit, [f"build/{name}/*" for name in names])
        except LocalEntryNotFoundError:
            self.download(commit, [f"build/{name}/*" for name in fewer])
            return fewer
        return names

    def _size_bytes(self, commit: str) -> int | None:
        """Of `build/`; None where the Hub cannot be reached."""
        if constants.HF_HUB_OFFLINE:
            return None
        try:
            tree = list(
                self.api.list_repo_tree(self.repo, "build", recursive=True, revision=commit, repo_type="kernel")
            )
        except _HTTP_ERROR:
            return None
        return sum(item.size for item in tree if isinstance(item, RepoFile))

    def versions(self) -> list[int]:
        """The versions that there are, as far as the Hub answers."""
        try:
            branches = self.api.list_repo_refs(self.repo, repo_type="kernel").branches
        except (_HTTP_ERROR, OSError):
            return []
        return sorted(int(found[1]) for branch in branches if (found := _VERSION.fullmatch(branch.name)))


@contextmanager
def _one_line(hub: _Repository, asked: str, where: str) -> Iterator[None]:
    """What huggingface_hub raises, as one line of ours."""
    try:
        yield
    except RepositoryNotFoundError:
        raise RecipeError(
            f"{where}: {hub.api.endpoint} has no kernel repository {hub.repo!r} that you can see",
            fix="check the name, or log in with `hf auth login`",
        ) from None
    except RevisionNotFoundError:
        versions = hub.versions()
        raise RecipeError(
            f"{where} has no {_words(asked)}",
            fix=f"it has version {', '.join(map(str, versions))}"
            if versions
            else "it has no versions: give a revision",
        ) from None
    except LocalEntryNotFoundError as error:
        offline = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the Hub cannot be reached ({one_line(error)})"
        )
        raise KernelRefusedError(
            f"{where}: {_words(asked)} is not whole in the Hub cache, and {offline}",
            fix="run once with a connection: what is downloaded then stays",
        ) from None
    except HFValidationError as error:
        raise RecipeError(f"{where} is no name for the Hub ({one_line(error)})", fix="write owner/repo:Class") from None
    except (_HTTP_ERROR, OSError) as error:
        raise KernelRefusedError(
            f"{where} cannot be downloaded ({one_line(error)})", fix="check the connection and HF_ENDPOINT"
        ) from None


def _words(asked: str) -> str:
    version = _VERSION.fullmatch(asked)
    return f"version {version[1]}" if version else f"revision {asked!r}"


def _locked_commit(lock: Path, repo: str, asked: str, where: str) -> str:
    """The commit of a `kernels.lock`.

    Raises:
        RecipeError: the file cannot be read, lacks the repository, or is for another version.
    """
    from kernels.locking import get_locked_kernel_revision

    fix = "lock it again with `kernels lock`, or ask for what is locked"
    try:
        locks, dependency = get_locked_kernel_revision(repo, lock)
        commit = str(locks[dependency].commit)
    except (OSError, ValueError) as error:
        reason = "it is not locked" if f"`{repo}` is not locked" in str(error) else one_line(error)
        raise RecipeError(f"{where}: {reason}", where=str(lock), fix=fix) from None
    kept = dependency.version
    locked = wanted_revision(version=getattr(kept, "version", None), revision=getattr(kept, "revision", None))
    if asked not in (locked, commit):
        raise RecipeError(f"{where} asks for {_words(asked)}, and {_words(locked)} is locked", where=str(lock), fix=fix)
    return commit


def _private_copy(snapshot: Path, names: Sequence[str], package_id: str) -> PackageCopy:
    """The variants `names` of a snapshot, whose files are links into the blobs of its cache."""
    blobs = snapshot.parent.parent / "blobs"
    copied = copy_package(snapshot, package_id, linked=blobs.resolve(), variants=frozenset(names))
    for name in copied.files:
        expected = (snapshot / name).resolve()
        if expected.parent == blobs.resolve() and not _is_blob((copied.path / name).read_bytes(), expected.name):
            raise KernelRefusedError(
                f"kernel package {package_id!r}: {name} in the Hub cache is not what was downloaded",
                where=str(snapshot),
                fix="remove this folder of the cache and download it again",
            )
    return copied


def _is_blob(data: bytes, etag: str) -> bool:
    """Whether `data` has this etag: a git object ID, or a sha256 for large files; others say nothing."""
    if len(etag) == 40:
        git = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False)
        return git.hexdigest() == etag
    return len(etag) != 64 or hashlib.sha256(data).hexdigest() == etag
