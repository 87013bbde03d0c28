"""The commands, each from parsed options to what it prints and writes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from recoup import auditing, batching, engines, fitting, measuring
from recoup.batching import BatchChoice
from recoup.cli.factory import Factory, load_factory
from recoup.cli.sized_frontier import sized_frontier
from recoup.engines import ModelPlan
from recoup.errors import CommandError, EncodingError
from recoup.measuring import Profile
from recoup.measuring.estimate.machine import hardware_to_json
from recoup.model.factory_result import Made
from recoup.model.several_samples import read_samples
from recoup.planning.documents import write_document
from recoup.progress import showing
from recoup.sizes import format_bytes

__all__ = ["audit", "demo", "fit", "frontier", "hardware", "measure", "plan"]

_FRONTIER_VERSION = 1


def fit(options: Namespace) -> None:
    """``recoup fit``."""
    made = load_factory(options.factory).build(options.batch)
    with _progress(options):
        fitted = fitting.fit(
            **vars(made),
            budget=options.budget,
            sizes=options.sizes,
            units=options.units,
            accumulates=options.accumulates,
            verify=not options.no_verify,
            race=not options.no_race,
            engine=options.engine,
        )
    _say(options, fitted)
    _write(options, options.html, fitted.to_html, "Report")
    _write_json(options, fitted.applied.to_json(indent=1), "Plan")


def frontier(options: Namespace) -> None:
    """``recoup frontier``."""
    estimate = _estimate(options)
    factory = load_factory(options.factory)
    if estimate and options.batch is None and factory.needs_batch:
        options.batch = 1
    if options.sizes:
        _frontier_by_size(options, factory, estimate)
        return
    with _progress(options):
        profile = _measure(options, factory, estimate)
        points = engines.frontier(profile, num_points=options.points, budgets=options.budget)
        if not points:
            # Every budget is too small; the error names the smallest feasible one.
            engines.plan(profile, options.budget[0])
        answers = _largest_batches(options, factory, estimate)
    size = "" if options.batch is None else f" At a batch of {options.batch}:"
    _say(options, f"{profile}{size}\n{_table(profile, points)}")
    for answer in answers:
        _say(options, answer)
    body = {
        "model": profile.model,
        "device": profile.device,
        "plain": {"peak_bytes": profile.plain_bytes, "seconds": profile.plain.seconds},
        "points": [_figures(profile, point) for point in points],
        "largest_batches": [_batch_figures(answer) for answer in answers],
    }
    _write_frontier(options, "frontier", body)


def _frontier_by_size(options: Namespace, factory: Factory, estimate: dict[str, Any]) -> None:
    with _progress(options):
        made = factory.build(options.batch, unallocated=bool(estimate))
        samples = read_samples(made.sample, None, options.sizes)
        sizes = sorted(set(options.sizes), reverse=True)
        profiles = {
            size: _measure_made(options, replace(made, sample=sample), estimate)
            for size, sample in zip(sizes, samples, strict=True)
        }
        found = sized_frontier(profiles, num_points=options.points, budgets=options.budget)
    largest = profiles[max(sizes)]
    _say(options, f"{largest} At a size of {max(sizes)}.\n{found}")
    body = {"model": largest.model, "device": largest.device, "sizes": found.figures}
    _write_frontier(options, "frontier_by_size", body)


def _write_frontier(options: Namespace, kind: str, body: dict[str, Any]) -> None:
    text = write_document("recoup.cli", _FRONTIER_VERSION, kind, body, indent=1)
    _write_json(options, text, "Frontier")


def audit(options: Namespace) -> None:
    """``recoup audit``."""
    made = load_factory(options.factory).build(options.batch)
    with _progress(options):
        found = auditing.audit(made.model, made.sample, loss=made.loss, step=made.step, units=options.units)
    _say(options, found)


def measure(options: Namespace) -> None:
    """``recoup measure``."""
    estimate = _estimate(options)
    factory = load_factory(options.factory)
    with _progress(options):
        profile = _measure(options, factory, estimate)
    _say(options, profile)
    _write_json(options, profile.to_json(indent=1), "Profile")


def plan(options: Namespace) -> None:
    """``recoup plan``."""
    text = _read(options.profile)
    try:
        profile = Profile.from_json(text)
    except EncodingError as error:
        raise EncodingError(f"{options.profile}: {error}") from error
    chosen = engines.plan(profile, options.budget)
    _say(options, chosen)
    _write_json(options, chosen.to_json(indent=1), "Plan")


def hardware(options: Namespace) -> None:
    """``recoup hardware``."""
    with _progress(options):
        measured = measuring.measure_hardware()
    _say(options, measured)
    _write_json(options, hardware_to_json(measured), "Hardware")


def demo(options: Namespace) -> None:
    """``recoup demo``."""
    from recoup.demo import run

    with _progress(options):
        shown = run()
    _say(options, shown)


# Parts


def _progress(options: Namespace) -> AbstractContextManager[None]:
    return showing(not options.quiet)


def _say(options: Namespace, what: object) -> None:
    if not options.quiet:
        print(what)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"Cannot read {path}: {error}") from error


def _write_json(options: Namespace, text: str, what: str) -> None:
    _write(options, options.json, lambda path: path.write_text(text + "\n", encoding="utf-8"), what)


def _write(options: Namespace, path: Path | None, write: Callable[[Path], object], what: str) -> None:
    """Writes a file, if one was asked for, and says so."""
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise CommandError(f"Cannot write {path}: {error.strerror or error}") from error
    _say(options, f"{what}: {path}")


def _estimate(options: Namespace) -> dict[str, Any]:
    """What to estimate for, found before anything is built; nothing to measure on the real device."""
    if options.hardware is None:
        return {}
    ranks = {} if options.ranks is None else {"ranks": options.ranks}
    return {"hardware": measuring.find_hardware(options.hardware), **ranks}


def _measure(options: Namespace, factory: Factory, estimate: dict[str, Any]) -> Profile:
    return _measure_made(options, factory.build(options.batch, unallocated=bool(estimate)), estimate)


def _measure_made(options: Namespace, made: Made, estimate: dict[str, Any]) -> Profile:
    return measuring.measure(**vars(made), units=options.units, accumulates=options.accumulates, **estimate)


def _largest_batches(options: Namespace, factory: Factory, estimate: dict[str, Any]) -> list[BatchChoice]:
    """For every budget, or for all of the GPU's memory: the batch size with the best throughput."""
    if not estimate or not factory.takes_batch:
        return []
    return [
        batching.largest_batch(
            lambda batch: factory.build(batch, unallocated=True),
            budget=budget,
            units=options.units,
            accumulates=options.accumulates,
            most=options.most,
            **estimate,
        )
        for budget in options.budget or [estimate["hardware"].memory_bytes]
    ]


def _figures(profile: Profile, point: ModelPlan) -> dict[str, Any]:
    overhead = point.predicted_s / profile.plain.seconds - 1
    return {"budget_bytes": point.budget_bytes, "seconds": point.predicted_s, "overhead": overhead}


def _table(profile: Profile, points: tuple[ModelPlan, ...]) -> str:
    rows = [("budget", "seconds", "overhead")]
    for point in points:
        figures = _figures(profile, point)
        rows.append(
            (format_bytes(point.budget_bytes), f"{point.predicted_s:.4g}", f"{figures['overhead']:+.1%}")
        )
    return "\n".join(f"{budget:>12}{seconds:>12}{overhead:>12}" for budget, seconds, overhead in rows)


def _batch_figures(answer: BatchChoice) -> dict[str, Any]:
    return {
        "text": str(answer),
        "batch_size": answer.batch_size,
        "samples_per_second": answer.samples_per_second,
        "budget_bytes": answer.plan.budget_bytes,
        "predicted_bytes": answer.plan.predicted_bytes,
    }
