"""`apply`: write what was prepared, or write beside the check that prepares it.

Where the tensors have the same names in the files and in the model, what is written is known without the model.  It is then
copied while the model is built and compared, and published only if the check has come to the very same files; else
it is dropped, and what the check has come to is written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kconvert.checkpoint import is_inside_hub_cache
from kconvert.convert.job import build_job, final_items
from kconvert.convert.memory import peak_rss_bytes
from kconvert.convert.prepare import Opened, Prepared, check, open_source, plan_of_files
from kconvert.convert.record import transformers_version
from kconvert.errors import KconvertError, UsageError
from kconvert.plan import Plan
from kconvert.recipe import find_recipe, load_recipe, profile_of
from kconvert.rewrite import Job, OtherRunError, Reuse, RewriteResult, Writing, check_output

__all__ = ["ApplyResult", "Options", "apply_recipe", "default_output"]


@dataclass(frozen=True)
class ApplyResult:
    """What an `apply` did.  Sizes in bytes, times in seconds.

    Attributes:
        output: the converted directory.
        bytes_copied: tensors that are as in the source.
        bytes_transformed: tensors that are made of several.
        bytes_resumed: of the files, what an earlier run had finished.
        bytes_linked: of the files, what shares its blocks with the source.
        digested: of how many tensors the manifest has the digest.
        copy_seconds: from the first byte copied to the last.
        sync_seconds: from there until everything was on the disk.
        check_seconds: planning and checking; copying may have gone on meanwhile.
        total_seconds: all of it.
        peak_rss_bytes: of the process.
        prepared: what was written.
    """

    output: Path
    bytes_copied: int
    bytes_transformed: int
    bytes_resumed: int
    bytes_linked: int
    digested: int
    copy_seconds: float
    sync_seconds: float
    check_seconds: float
    total_seconds: float
    peak_rss_bytes: int
    prepared: Prepared


def default_output(model_dir: Path) -> Path:
    """`<model_dir>-kconvert`, beside the source.

    Raises:
        UsageError: the source lies in a Hub cache, where nothing else may be put.
    """
    if is_inside_hub_cache(model_dir):
        raise UsageError(f"{model_dir} lies in a Hub cache", fix="say where to write with -o OUTPUT")
    absolute = Path(os.path.abspath(model_dir))  # noqa: PTH100 - `..` goes, links stay
    return absolute.with_name(f"{absolute.name}-kconvert")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an output is written.

    Attributes:
        overwrite: replace an output that kconvert wrote.
        resume: go on where a run of the same conversion was stopped, and refuse to drop one of another.
        reuse: how files that do not change come about: copied, or linked to the source's.
        digests: keep the sha256 of every tensor in the manifest.
        max_shard_bytes: how many bytes of tensors an output file holds at most; the source's sharding if left out.
    """

    overwrite: bool = False
    resume: bool = True
    reuse: Reuse = "copy"
    digests: bool = False
    max_shard_bytes: int | None = None


DEFAULT_OPTIONS = Options()


def apply_recipe(
    recipe_name: str,
    model_dir: Path,
    output: Path | None = None,
    *,
    device: str | None = None,
    options: Options = DEFAULT_OPTIONS,
    model_check: bool = True,
    trust_remote_code: bool = False,
    trust_kernels: Mapping[str, str] | None = None,
    on_prepared: Callable[[Prepared, Job], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ApplyResult:
    """Convert a checkpoint.

    Args:
        recipe_name: a recipe file, or the name of a shipped recipe.
        model_dir: the source checkpoint; it is not changed.
        output: where to write; `<model_dir>-kconvert` if left out.
        device: see `prepare`.
        options: how it is written.
        model_check: see `prepare`.
        trust_remote_code, trust_kernels: see `prepare`.
        on_prepared: called once everything is checked, with what is written.
        on_progress: called with the number of bytes just written, after that.

    Raises:
        KconvertError: of the kind that says what was wrong; nothing is left under the output name.
    """
    started = time.perf_counter()
    target = output if output is not None else default_output(model_dir)
    check_output(target, source=model_dir, overwrite=options.overwrite)
    profile = profile_of(load_recipe(find_recipe(recipe_name)), device)
    opened = open_source(profile, model_dir, trust_remote_code=trust_remote_code, trust_kernels=trust_kernels)
    run = _Run(opened, target, options, model_check, on_prepared, on_progress)
    early = run.job_of_files() if model_check else None
    written = run.write_meanwhile(early) if early is not None else None
    prepared, result = written or run.write_checked()
    return ApplyResult(
        output=result.output,
        bytes_copied=prepared.plan.bytes_copied,
        bytes_transformed=prepared.plan.bytes_transformed,
        bytes_resumed=result.bytes_resumed,
        bytes_linked=result.bytes_linked,
        digested=len(prepared.plan.steps) if options.digests else 0,
        copy_seconds=result.copy_seconds,
        sync_seconds=result.sync_seconds,
        check_seconds=prepared.check_seconds,
        total_seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
        prepared=prepared,
    )


@dataclass(frozen=True)
class _Run:
    """One conversion, and the two ways to write it."""

    opened: Opened
    target: Path
    options: Options
    model_check: bool
    on_prepared: Callable[[Prepared, Job], None] | None
    on_progress: Callable[[int], None] | None

    def job_of_files(self) -> Job | None:
        """What is written, as far as it is known without the model; None where it is not."""
        if self.opened.resolved.packages:
            return None
        try:
            plan = plan_of_files(self.opened, max_shard_bytes=self.options.max_shard_bytes)
        except KconvertError:  # the check says it better, or finds that the model has other names
            return None
        return self._job(plan)

    def write_meanwhile(self, early: Job) -> tuple[Prepared, RewriteResult] | None:
        """Writes while it is checked; None where the check came to something else, or an earlier run had."""
        with contextlib.ExitStack() as stack:
            try:
                writing = stack.enter_context(self._writing(early))
            except OtherRunError:
                return None
            prepared = self._check()
            job = self._job(prepared.plan)
            return self._publish(writing, prepared, job) if job == early else None

    def write_checked(self) -> tuple[Prepared, RewriteResult]:
        """Checks, then writes."""
        prepared = self._check()
        job = self._job(prepared.plan)
        with self._writing(job) as writing:
            return self._publish(writing, prepared, job)

    def _check(self) -> Prepared:
        return check(self.opened, model_check=self.model_check, max_shard_bytes=self.options.max_shard_bytes)

    def _job(self, plan: Plan) -> Job:
        options = {
            "the model check": f"transformers {transformers_version()}" if self.model_check else "none",
            "--device": self.opened.profile.device or "none",
            "--reuse": self.options.reuse,
        }
        return build_job(self.opened, plan, digests=self.options.digests, options=options)

    def _writing(self, job: Job) -> Writing:
        options = self.options
        return Writing(
            job,
            self.target,
            overwrite=options.overwrite,
            resume=options.resume,
            reuse=options.reuse,
            on_progress=self.on_progress,
        )

    def _publish(self, writing: Writing, prepared: Prepared, job: Job) -> tuple[Prepared, RewriteResult]:
        if self.on_prepared is not None:
            self.on_prepared(prepared, job)
        digests = writing.wait()
        return prepared, writing.publish(final_items(prepared, digests))
