"""What a report does not show because it is not there: failed, unfinished and missing runs, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ncgru.lab.report.groups import Model, Section
from ncgru.lab.report.run import FINISHED, INTERRUPTED, RUNNING, STATUSES, STOPPED, Run
from ncgru.lab.report.values import count, listing

HOW = {RUNNING: "is still running", STOPPED: "was stopped", INTERRUPTED: "was interrupted"}


def missing(section: Section) -> list[str]:
    """A sentence for each run that did not come to its end, for seeds and for recipes that were not run."""
    sentences = [_unfinished(model, run) for model in section.models for run in model.runs if run.status != FINISHED]
    sentences += [
        f"{model.label}: the recipe's {_seeds(model.unrun)} not run." for model in section.models if model.unrun
    ]
    if section.missing:
        sentences.append(f"There are no runs of {listing(section.missing)}.")
    sentences += [f"{run.name}, seed {run.seed}: {problem}." for run in section.runs for problem in run.problems]
    return sentences


def summary(section: Section) -> str:
    """The same in a few words; empty if nothing is missing."""
    parts = [
        f"{count(amount, 'run')} {status}"
        for status in STATUSES[1:]
        if (amount := sum(run.status == status for run in section.runs))
    ]
    unrun = sum(len(model.unrun) for model in section.models)
    parts += [f"{count(unrun, 'seed')} not run"] if unrun else []
    parts += [f"{count(len(section.missing), 'recipe')} not run"] if section.missing else []
    return ", ".join(parts)


def progress(run: Run) -> str:
    """How far a run has come: 1,200 of 20,000."""
    return f"{run.step:,} of {run.steps:,}" if run.steps and run.step != run.steps else f"{run.step:,}"


def _unfinished(model: Model, run: Run) -> str:
    reason = f": {run.reason.rstrip('.')}" if run.reason else ""
    return f"{model.label}, seed {run.seed} {HOW.get(run.status, run.status)} at step {progress(run)}{reason}."


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]} was"
    consecutive = list(seeds) == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 2
    return f"seeds {f'{seeds[0]} to {seeds[-1]}' if consecutive else listing(seeds)} were"
