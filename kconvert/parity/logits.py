"""Level `logits`: the whole converted model against the whole stock model, on random tokens.

Several sequences without a mask, and two with one, of which one is padded on the left.  In the checkpoint's dtype and
in float32; with the references, which have to give the stock bits, and with the kernels that "auto" chooses.  Masked
positions are compared bit for bit and left out of the figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from kconvert.errors import one_line
from kconvert.kernels.probe import eval_mode, forked_random_state, sample_ids
from kconvert.kernels.report import REFERENCE, build_report
from kconvert.parity.compare import Difference, judge, same_bits
from kconvert.parity.job import SEED, VerifyJob
from kconvert.parity.loading import choose_kernels, dtype_name, load_packed, load_stock, reference_only, release
from kconvert.parity.memory import free_bytes
from kconvert.parity.results import LogitsLevel, LogitsResult, Verdict
from kconvert.parity.tolerances import LOGITS_LIMITS, TOP1_RULE, limit_of

__all__ = ["Figures", "compare_logits", "measure"]

_NUM_SEQUENCES = 3
_NUM_TOKENS = 24
_NUM_PADDED = 8


@dataclass
class _Expected:
    """What the stock model takes and gives: keyword arguments and mask per batch, and logits by dtype."""

    batches: list[tuple[dict[str, Any], torch.Tensor]] = field(default_factory=list)
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


class _NoLogitsError(Exception):
    """Why there is nothing to compare; never leaves this module."""


def compare_logits(job: VerifyJob) -> LogitsLevel:
    """Run the level; one model is in memory at a time."""
    results: tuple[LogitsResult, ...] = ()
    stopped = None
    try:
        expected = _observe_stock(job)
        release()
        results = _compare_packed(job, expected)
    except _NoLogitsError as error:
        stopped = str(error)
    return LogitsLevel(
        results=results,
        stopped=stopped,
        settings={
            "seed": SEED,
            "sequences": _NUM_SEQUENCES,
            "tokens": _NUM_TOKENS,
            "limits": {"reference": 0.0, "auto": LOGITS_LIMITS},
            "top1_rule": TOP1_RULE,
        },
    )


def _observe_stock(job: VerifyJob) -> _Expected:
    model = load_stock(job)
    own = dtype_name(model.dtype)
    expected = _Expected()
    expected.outputs[own] = _first_run(model, expected, job.device)
    if own == "float32":
        return expected
    reason = _no_float32(model, job.device)
    if reason is None:
        expected.outputs["float32"] = _run_all(model.float(), expected, job.device)
    else:
        expected.not_run["float32"] = reason
    return expected


def _no_float32(model: Any, device: str) -> str | None:
    """Why the model cannot be cast to float32, or None."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "the weights are quantised"
    more = sum(max(4 - weight.element_size(), 0) * weight.numel() for weight in model.parameters())
    free = free_bytes(device)
    if free is None or more <= free:
        return None
    return f"it takes {more / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"


def _sequences(model: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Tokens, and a mask for some of them."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = min(_NUM_TOKENS, most) if isinstance(most, int) and most > 0 else _NUM_TOKENS
    plain = sample_ids(model, batch=_NUM_SEQUENCES, tokens=tokens, seed=SEED)
    padded = sample_ids(model, batch=2, tokens=tokens, seed=SEED + 1)
    mask = torch.ones_like(padded)
    mask[0, : min(_NUM_PADDED, tokens - 1)] = 0
    return [(plain, None), (padded, mask)]


def _first_run(model: Any, expected: _Expected, device: str) -> list[torch.Tensor]:
    """Run the stock model, and note which arguments it takes."""
    outputs = []
    for ids, mask in _sequences(model):
        masked = {} if mask is None else {"attention_mask": mask}
        failures = []
        for extra in ({"use_cache": False}, {}):
            call: dict[str, Any] = {"input_ids": ids, **masked, **extra}
            try:
                outputs.append(_run(model, call, device))
            except _NoLogitsError:
                raise
            except Exception as error:  # noqa: BLE001 - foreign model code may raise anything: it takes no such call
                failures.append(one_line(error))
                continue
            expected.batches.append((call, torch.ones_like(ids) if mask is None else mask))
            break
        else:
            if mask is None:
                raise _NoLogitsError(f"the stock model does not run on tokens ({failures[0]})")
    return outputs


def _run_all(model: Any, expected: _Expected, device: str) -> list[torch.Tensor]:
    return [_run(model, call, device) for call, _ in expected.batches]


def _run(model: Any, call: dict[str, Any], device: str) -> torch.Tensor:
    """Logits `[batch, positions, labels]`, on the CPU; one position where the model gives one per sequence."""
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with torch.no_grad(), forked_random_state(torch.device(device)), eval_mode(model):
        logits = getattr(model(**moved), "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() not in (2, 3):
        raise _NoLogitsError(f"{type(model).__name__} gives no logits")
    return (logits[:, None] if logits.dim() == 2 else logits).cpu()


def _compare_packed(job: VerifyJob, expected: _Expected) -> tuple[LogitsResult, ...]:
    model = load_packed(job)
    results: list[LogitsResult] = []
    for dtype, outputs in expected.outputs.items():
        if dtype != dtype_name(model.dtype):
            choose_kernels(model.float(), job.manifest)
        with reference_only(model):
            results.append(_compare(model, expected, outputs, dtype, "reference", job.device))
        results.append(_compare(model, expected, outputs, dtype, "auto", job.device))
    for dtype, reason in expected.not_run.items():
        for kernels in ("reference", "auto"):
            results.append(LogitsResult(dtype, kernels, REFERENCE, Verdict.NOT_RUN, None, 0.0, reason))
    return tuple(results)


def _compare(
    model: Any, expected: _Expected, outputs: list[torch.Tensor], dtype: str, kernels: str, device: str
) -> LogitsResult:
    limit = 0.0 if kernels == "reference" else limit_of(LOGITS_LIMITS, dtype)
    kernel = REFERENCE if kernels == "reference" else "+".join(sorted(build_report(model).to_dict()["kernels"]))
    try:
        found = _run_all(model, expected, device)
        reason = _unlike(outputs, found)
    except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and that is a finding
        reason = f"the converted model does not run ({one_line(error)})"
    if reason is not None:
        return LogitsResult(dtype, kernels, kernel, Verdict.FAILED, None, limit, reason)
    masks = [mask for _, mask in expected.batches]
    return _judged(measure(outputs, found, masks, limit), dtype, kernels, kernel, limit)


def _unlike(expected: list[torch.Tensor], found: list[torch.Tensor]) -> str | None:
    """Why two lists of logits cannot be subtracted, or None."""
    for one, two in zip(expected, found, strict=True):
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return (
                f"logits are {dtype_name(two.dtype)} {list(two.shape)}, stock {dtype_name(one.dtype)} {list(one.shape)}"
            )
    return None


@dataclass(frozen=True)
class Figures:
    """What `measure` finds; the names are those of `LogitsResult`.  `num_decided` are other tokens beyond the limit."""

    is_equal: bool
    max_abs: float
    mean_abs: float
    largest: float
    kl: float | None
    top1: float
    positions: int
    num_decided: int
    num_special: int


def measure(
    expected: list[torch.Tensor], found: list[torch.Tensor], masks: list[torch.Tensor], limit: float
) -> Figures:
    """Compare logits `[batch, positions, labels]` over the positions that the masks `[batch, positions]` let through.

    Kullback-Leibler divergence is `sum p * (log p - log q)` with p of `expected`, from log-softmax in float64.

    Args:
        expected: of the stock model, per batch.
        found: of the converted model.
        masks: 1 for a position that counts.
        limit: a share of the largest expected logit.
    """
    one, two = (
        [
            _positions(logits, mask)
            for batch, mask in zip(side, masks, strict=True)
            for logits, mask in zip(batch, mask, strict=True)
        ]
        for side in (expected, found)
    )
    largest = max((_largest(logits) for logits in one), default=0.0)
    is_equal = all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    apart, kl, num_special, num_same, num_decided, count = 0.0, 0.0, 0, 0, 0, 0
    total = 0.0
    for a, b in zip(one, two, strict=True):
        finite = a.isfinite() & b.isfinite()
        num_special += int((~finite & ~((a == b) | (a.isnan() & b.isnan()))).sum())
        gaps = torch.where(finite, (a - b).abs(), 0.0)
        apart, total = max(apart, _largest(gaps)), total + float(gaps.sum())
        best, other = a.argmax(-1), b.argmax(-1)
        num_same += int((best == other).sum())
        lost = (a.gather(-1, best[:, None]) - a.gather(-1, other[:, None]))[:, 0]
        num_decided += int((lost > limit * largest).sum())
        kl += float(_divergence(a, b).sum())
        count += len(a)
    size = sum(logits.numel() for logits in one)
    return Figures(
        is_equal=is_equal,
        max_abs=apart,
        mean_abs=total / max(size, 1),
        largest=largest,
        kl=max(kl / max(count, 1), 0.0) if math.isfinite(kl) else None,
        top1=num_same / max(count, 1),
        positions=count,
        num_decided=num_decided,
        num_special=num_special,
    )


def _positions(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows that count, in float64; a model that gives one row per sequence has no masked one."""
    rows = logits.double()
    return rows[mask.bool()] if len(rows) == len(mask) else rows


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence per row, in nats."""
    log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _judged(figures: Figures, dtype: str, kernels: str, kernel: str, limit: float) -> LogitsResult:
    relative: float | None = None
    reason: str | None = None
    if figures.num_special:
        reason = f"{figures.num_special} logits are NaN or infinite on one side only"
    elif figures.largest == 0.0 and figures.max_abs > 0.0:
        reason = "the stock logits are zero everywhere, and these are not"
    else:
        relative = figures.max_abs / figures.largest if figures.largest else 0.0
    is_proof = figures.largest > 0.0
    vacuous = None if is_proof else "every logit is zero, NaN or infinite, which proves nothing"
    verdict, why = judge(Difference(figures.is_equal, relative, is_proof, reason or vacuous), limit=limit)
    if verdict is Verdict.WITHIN and figures.num_decided:
        verdict = Verdict.FAILED
        why = f"{figures.num_decided} of {figures.positions} positions have another most likely token, beyond the limit"
    return LogitsResult(
        dtype=dtype,
        kernels=kernels,
        kernel=kernel,
        verdict=verdict,
        difference=relative,
        limit=limit,
        reason=why,
        max_abs=figures.max_abs,
        mean_abs=figures.mean_abs,
        largest=figures.largest,
        kl=figures.kl,
        top1=figures.top1,
        positions=figures.positions,
    )
