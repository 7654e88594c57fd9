"""A stand-in for the Hub: an HTTP server on loopback that serves kernel repositories.

It answers what `kernels` and its `huggingface_hub` ask of a kernel repository: repo info, refs, tree listing, file HEAD
and GET, and the overview of an owner.  Nothing else of the Hub is there.

    with StandInHub() as hub:
        commit = hub.publish("org/repo", {"build/torch-cpu/layers.py": "..."}, branch="v1")  # version 1
        hub.publish("org/repo", folder, branch="v2")                     # a folder's files; version 2
        hub.tag("org/repo", "release", commit)
        hub.publishers.add("org")                                        # `kernels` trusts this owner
        use_hub(monkeypatch, hub, tmp_path / "cache")                    # this process talks to it
        subprocess.run(..., env=hub.environment(tmp_path / "cache"))     # or another one does
        hub.requests                                                     # ["GET /api/kernels/org/repo/refs", ...]

A commit is a hash over its files, so the same files have the same commit.  Old commits stay there when a branch moves.
`offline=True` in `use_hub` and `environment` sets HF_HUB_OFFLINE; a stopped hub refuses connections.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

__all__ = ["StandInHub", "built_package", "kernel_metadata", "use_hub"]


def kernel_metadata(name: str, backend: str = "cpu", *, version: int = 1, **kw: Any) -> str:
    """The text of a `metadata.json` for one build variant; `name` has lower-case letters, digits and dashes."""
    identity = hashlib.sha256(f"{name}-{backend}-{version}".encode()).hexdigest()[:12]
    values = {
        "id": f"_{name.replace('-', '_')}_{backend}_{identity}",
        "name": name,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        **kw,
    }
    return json.dumps(values, indent=2)


def built_package(
    layers: str, *, name: str = "kernel", variants: tuple[str, ...] = ("torch-cpu", "torch-cuda"), version: int = 1
) -> dict[str, str]:
    """The files of a built kernel repository: `build/<variant>/` with `__init__.py`, `layers.py` and `metadata.json`."""
    files = {}
    for variant in variants:
        backend = variant.rpartition("-")[2]
        folder = f"build/{variant}"
        files[f"{folder}/__init__.py"] = 'from . import layers\n\n__all__ = ["layers"]\n'
        files[f"{folder}/layers.py"] = layers
        files[f"{folder}/metadata.json"] = kernel_metadata(
            name, "cpu" if backend == "universal" else backend, version=version
        )
    return files


def _oid(data: bytes) -> str:
    """A file's git object ID, which is what the Hub gives as its etag."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def _files_of(files: Path | Mapping[str, str | bytes]) -> dict[str, bytes]:
    if isinstance(files, Path):
        return {
            path.relative_to(files).as_posix(): path.read_bytes()
            for path in sorted(files.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
    return {name: data.encode() if isinstance(data, str) else data for name, data in sorted(files.items())}


@dataclass
class _Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision: str) -> str | None:
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)


class StandInHub:
    """The server; a context manager that serves from its start to its end."""

    def __init__(self) -> None:
        self.repositories: dict[str, _Repository] = {}
        self.publishers: set[str] = set()
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT has to be."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def publish(self, repo: str, files: Path | Mapping[str, str | bytes], *, branch: str = "main") -> str:
        """Commit these files, and no others, on a branch of `owner/repo`.  Gives the commit."""
        made = _files_of(files)
        total = hashlib.sha1(repo.encode(), usedforsecurity=False)
        for name, data in made.items():
            total.update(f"{name}\0{_oid(data)}\n".encode())
        commit = total.hexdigest()
        repository = self.repositories.setdefault(repo, _Repository())
        repository.commits[commit] = made
        repository.branches[branch] = commit
        repository.branches.setdefault("main", commit)
        return commit

    def tag(self, repo: str, name: str, commit: str) -> None:
        """Name a commit."""
        self.repositories[repo].tags[name] = commit

    def environment(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """The environment for another process that talks to this hub, with a cache of its own."""
        kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
        return {
            **kept,
            **_SETTINGS,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": str(int(offline)),
        }


_DROPPED = frozenset(
    {"HF_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE", "KERNELS_CACHE", "LOCAL_KERNELS"}
)
# HF_HUB_DISABLE_TELEMETRY is not here: with it, `kernels` 0.17.2 sends an empty user agent, which its own client refuses.
_SETTINGS = {
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_XET": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: StandInHub, cache: Path, *, offline: bool = False) -> None:
    """Let `huggingface_hub` and `kernels` of this process talk to `hub`, with a cache of its own, until the test ends."""
    from huggingface_hub import close_session, constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    for name in _DROPPED:
        monkeypatch.delenv(name, raising=False)
    for name, value in _SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(offline)))
    # the library has read its environment when it was imported
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    disable_progress_bars()
    close_session()  # a client that was made before may go through a proxy


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


def _json(value: Any) -> _Answer:
    return _Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _missing(code: str, headers: Mapping[str, str] | None = None) -> _Answer:
    return _Answer(404, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}, b"")


def _answer(hub: StandInHub, path: str, *, recursive: bool) -> _Answer:
    match [unquote(part) for part in path.strip("/").split("/")]:
        case ["api", "organizations", owner, "overview"]:
            trusted = owner in hub.publishers
            return _json({"name": owner, "fullname": owner, "avatarUrl": "", "trustedKernelPublisher": trusted})
        case ["api", "kernels", owner, name, *rest] if (found := hub.repositories.get(f"{owner}/{name}")) is not None:
            return _repository_answer(f"{owner}/{name}", found, rest, recursive=recursive)
        case ["kernels", owner, name, "resolve", revision, *rest] if f"{owner}/{name}" in hub.repositories:
            return _file_answer(hub.repositories[f"{owner}/{name}"], revision, "/".join(rest))
    return _missing("RepoNotFound")


def _repository_answer(repo: str, found: _Repository, rest: list[str], *, recursive: bool) -> _Answer:
    match rest:
        case ["refs"]:
            kinds = {"branches": ("heads", found.branches), "tags": ("tags", found.tags), "converts": ("", {})}
            return _json(
                {
                    kind: [
                        {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit}
                        for name, commit in refs.items()
                    ]
                    for kind, (folder, refs) in kinds.items()
                }
            )
        case [] | ["revision", _]:
            commit = found.resolve(rest[1] if rest else "main")
            if commit is None:
                return _missing("RevisionNotFound")
            return _json(
                {"id": repo, "author": repo.partition("/")[0], "sha": commit, "private": False, "gated": False}
            )
        case ["tree", revision, *inside]:
            commit = found.resolve(revision)
            if commit is None:
                return _missing("RevisionNotFound")
            return _tree_answer(found.commits[commit], "/".join(inside), recursive=recursive)
    return _missing("EntryNotFound")


def _tree_answer(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> _Answer:
    prefix = f"{folder}/" if folder else ""
    inside = {name: data for name, data in files.items() if name.startswith(prefix)}
    if prefix and not inside:
        return _missing("EntryNotFound")
    folders = {parent.as_posix() for name in inside for parent in Path(name).parents} - {".", folder}
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": path, "oid": _oid(path.encode()), "size": 0} for path in sorted(folders)
    ]
    entries += [{"type": "file", "path": name, "oid": _oid(data), "size": len(data)} for name, data in inside.items()]
    kept = [entry for entry in entries if recursive or "/" not in entry["path"].removeprefix(prefix)]
    return _json(kept)


def _file_answer(found: _Repository, revision: str, name: str) -> _Answer:
    commit = found.resolve(revision)
    if commit is None:
        return _missing("RevisionNotFound")
    data = found.commits[commit].get(name)
    if data is None:
        return _missing("EntryNotFound", {"X-Repo-Commit": commit})
    headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"', "Content-Type": "application/octet-stream"}
    return _Answer(200, headers, data)


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def _reply(self, *, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            parts = urlsplit(self.path)
            answer = _answer(hub, parts.path, recursive="recursive=true" in parts.query.lower())
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing on stderr."""

    return Handler
