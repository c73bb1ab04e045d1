"""Runs put together: a section for each task, in it a model for each recipe, in it the seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ncgru.lab import recipes
from ncgru.lab.recipes.common import MODELS
from ncgru.lab.report.references import QUICK, flat, setting
from ncgru.lab.report.run import FAILED, FINISHED, STATUSES, Run
from ncgru.lab.report.units import Unit
from ncgru.lab.report.values import quantile

SOLVED_SHARE = 0.1
"""A seed has solved a task once its loss has come this close to the irreducible one, as a share of the way there."""

MODEL_NAMES = {
    "lstm": "LSTM",
    "gru": "GRU",
    "cho-gru": "GRU (reset before)",
    "scornn": "scoRNN",
    "goru": "GORU",
    "nc-gru": "NC-GRU",
}


@dataclass(frozen=True)
class Spread:
    """A number over seeds; NaN throughout where there is none."""

    median: float
    low: float
    high: float
    best: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median, quartiles and minimum."""
        return cls(quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75), min(values, default=math.nan))


@dataclass(frozen=True)
class Model:
    """All seeds of one recipe with the same settings.

    Attributes:
        label: name within its section.
        colour: number of its colour, the same in all sections where the same model occurs.
        runs: its seeds, in their order.
    """

    label: str
    colour: int
    runs: tuple[Run, ...]

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return self.runs[0].name

    @property
    def ended(self) -> list[Run]:
        """The seeds of which no more is to come."""
        return [run for run in self.runs if run.ended]

    @property
    def counted(self) -> list[Run]:
        """The seeds that the table's numbers are over: those that ended; as long as there is none, all of them."""
        return self.ended or list(self.runs)

    @property
    def provisional(self) -> bool:
        """Whether the numbers are those of runs that go on."""
        return not self.ended

    @cached_property
    def minimum(self) -> Spread:
        """Minimum over training, the paper's rule."""
        return Spread.of([math.inf if run.headline_min is None else run.headline_min for run in self._measured])

    @cached_property
    def final(self) -> Spread:
        """Value at the end of training; that of a failed seed is worse than any number."""
        return Spread.of([_final(run) for run in self._measured])

    @property
    def paper(self) -> dict[str, Any] | None:
        """The paper's number as the recipe has it; None where the task was changed and is no longer the paper's."""
        run = self.runs[0]
        changed = any(name.startswith("task.") for name, _, _ in run.differences or ())
        return None if changed else run.recipe.get("paper") or None

    @property
    def failed(self) -> list[Run]:
        """The seeds that failed."""
        return [run for run in self.runs if run.status == FAILED]

    @property
    def unrun(self) -> list[int]:
        """Seeds that the recipe names and of which there is no run."""
        return sorted(set(self.runs[0].recipe.get("seeds") or ()) - {run.seed for run in self.runs})

    def solved(self) -> int | None:
        """How many of the counted seeds solved the task; None where no irreducible loss is known."""
        goal = solved_below(self.runs[0])
        if goal is None:
            return None
        return sum(run.headline_min is not None and run.headline_min <= goal for run in self.counted)

    @property
    def _measured(self) -> list[Run]:
        """Counted seeds; one that goes on and has no value yet says nothing."""
        return [run for run in self.counted if run.ended or run.headline_min is not None]


@dataclass(frozen=True)
class Section:
    """A task with its models.

    Attributes:
        title: the task, with what sets it apart from a task of the same name.
        models: in the order of the recipes.
        missing: recipes that belong here and of which there are no runs.
    """

    title: str
    models: tuple[Model, ...]
    missing: tuple[str, ...]

    @property
    def changes(self) -> str:
        """Settings in which all models differ alike from the recipes of their names, in short; may be empty."""
        own = {name for name, _, _ in self.runs[0].differences or ()}
        return changes(self.runs[0], own - _shared_changes(self.runs))

    @property
    def runs(self) -> list[Run]:
        """All runs of the section."""
        return [run for model in self.models for run in model.runs]

    @property
    def unit(self) -> Unit:
        """In which its tables speak."""
        return Unit.of((model.paper for model in self.models), self.runs[0].recipe.get("task"))

    def reference(self, read: Callable[[Run], float | None]) -> float | None:
        """A value that all runs of the task share, such as the trivial loss."""
        return next((value for value in map(read, self.runs) if value is not None), None)


def solved_below(run: Run) -> float | None:
    """The loss from which on the run's task counts as solved; None where that cannot be said."""
    if run.trivial_loss is None or run.irreducible_loss is None:
        return None
    return run.irreducible_loss + SOLVED_SHARE * (run.trivial_loss - run.irreducible_loss)


def sections(runs: Iterable[Run]) -> list[Section]:
    """The sections in the order of the recipes; each task's ablations stand in sections of their own behind it."""
    by_task = sorted(_grouped(runs, _task_key), key=lambda group: _recipe_order(group[0].name))
    titles = _task_titles([group[0] for group in by_task])
    slugs = sorted({_slug(run) for group in by_task for run in group} | set(MODELS), key=_slug_order)
    found = []
    for title, group in zip(titles, by_task, strict=True):
        models = [Model(label, slugs.index(_slug(seeds[0])), tuple(seeds)) for label, seeds in _labelled(group)]
        ablations = _ablations(title, models)
        elsewhere = {model.recipe for section in ablations for model in section.models}
        main = [model for model in models if model.recipe not in elsewhere or _slug(model.runs[0]) in MODELS]
        found += [Section(title, tuple(main), _missing(group))] if main else []
        found += ablations
    return found


def _ablations(title: str, models: Sequence[Model]) -> list[Section]:
    """What the recipes hold against each other, as far as there are runs of at least two; with colours of its own."""
    found = []
    for name, members in recipes.groups().items():
        there = [model for model in models if model.recipe in members]
        if len({model.recipe for model in there}) > 1:
            there.sort(key=lambda model: members.index(model.recipe))
            coloured = tuple(replace(model, colour=colour) for colour, model in enumerate(there))
            missing = tuple(member for member in members if member not in {model.recipe for model in there})
            found.append(Section(f"{title}, {name.rpartition('/')[2]}", coloured, missing))
    return found


def _labelled(runs: list[Run]) -> list[tuple[str, list[Run]]]:
    """The models of a task with their labels; changes that all of them share are left to the section's note."""
    models = _grouped(runs, _model_key)
    for model in models:
        model.sort(key=lambda run: run.seed)
    shared = _shared_changes(runs)
    models.sort(key=lambda model: (_slug_order(_slug(model[0])), changes(model[0], shared)))
    own = [changes(model[0], shared) for model in models]
    labels = [_pretty(model[0]) + (f" ({change})" if change else "") for model, change in zip(models, own, strict=True)]
    labels = _apart(labels, [_slug(model[0]) for model in models])
    return list(zip(_apart(labels, [str(number) for number in range(1, len(labels) + 1)]), models, strict=True))


def _grouped(runs: Iterable[Run], key: Callable[[Run], str]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _task_key(run: Run) -> str:
    return json.dumps([_task_title(run), run.recipe.get("task")], sort_keys=True, default=str)


def _model_key(run: Run) -> str:
    settings = {name: value for name, value in flat(run.recipe).items() if setting(name)}
    return json.dumps([run.name, settings], sort_keys=True, default=str)


def _task_title(run: Run) -> str:
    family = run.name.partition("/")[0].removesuffix(QUICK)
    return f"{family}, quick" if run.name.endswith(QUICK) else family


def _task_titles(tasks: Sequence[Run]) -> list[str]:
    """The tasks' names; where several have the same one, with the settings that set them apart."""
    names = [_task_title(run) for run in tasks]
    settings = [flat(run.recipe.get("task") or {}) for run in tasks]
    titles = []
    for name, own in zip(names, settings, strict=True):
        namesakes = [other for other_name, other in zip(names, settings, strict=True) if other_name == name]
        apart = [key for key, value in own.items() if any(other.get(key) != value for other in namesakes)]
        titles.append(" · ".join([name, *(f"{key} {_brief(own[key])}" for key in apart)]))
    return titles


def _slug(run: Run) -> str:
    return (run.name.partition("/")[2] or run.name).removesuffix(QUICK)


def _pretty(run: Run) -> str:
    """NC-GRU(U_r, U_c) for a kind of model that is known, with the recipe's mark, else what the recipe calls it."""
    model = run.recipe.get("model")
    kind = str(model.get("kind", "")) if isinstance(model, dict) else ""
    if not isinstance(model, dict) or kind not in MODEL_NAMES:
        return _slug(run)
    matrices = ", ".join(f"U_{letter}" for letter in str(model.get("orthogonal") or ""))
    mark = _slug(run).partition("@")[2]
    return MODEL_NAMES[kind] + (f"({matrices})" if matrices else "") + (f" @{mark}" if mark else "")


def changes(run: Run, without: Collection[str] = ()) -> str:
    """The settings that are not the named recipe's, in short, apart from those `without`."""
    changed = [
        f"{name.rpartition('.')[2]}={_brief(value)}" for name, value, _ in run.differences or () if name not in without
    ]
    return ", ".join([*changed[:3], *([f"{len(changed) - 3} more settings"] if len(changed) > 3 else [])])


def _shared_changes(runs: Sequence[Run]) -> set[str]:
    """Settings that all runs have changed to the same value."""
    own = [{name: _brief(value) for name, value, _ in run.differences or ()} for run in runs]
    return {name for name, value in own[0].items() if all(other.get(name) == value for other in own)}


def _brief(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _apart(names: Sequence[str], extras: Sequence[str]) -> list[str]:
    """The names, with an extra word for those that occur more than once."""
    return [f"{name} · {extra}" if names.count(name) > 1 else name for name, extra in zip(names, extras, strict=True)]


def _slug_order(slug: str) -> tuple[int, str]:
    """The models of the paper's tables in their order, then all others."""
    return (MODELS.index(slug) if slug in MODELS else len(MODELS), slug)


def _recipe_order(name: str) -> tuple[int, str]:
    known = recipes.names()
    base = name.removesuffix(QUICK)
    return (known.index(base) if base in known else len(known), name)


def _missing(runs: Sequence[Run]) -> tuple[str, ...]:
    """Rows of the paper's table for the runs' task that are not among them."""
    if any(run.name.endswith(QUICK) for run in runs):
        return ()
    family = runs[0].name.partition("/")[0]
    there = {run.name for run in runs}
    named = [
        name for name in recipes.names() if name.startswith(f"{family}/") and "@" not in name and name not in there
    ]
    return tuple(name for name in named if recipes.get(name).paper is not None)


def _final(run: Run) -> float:
    failed = run.status == FAILED or run.headline_final is None or not math.isfinite(run.headline_final)
    return math.inf if failed or run.headline_final is None else run.headline_final


def state_of(model: Model) -> str:
    """How the seeds stand, in short: 8; 7 + 1 failed; 2 interrupted."""
    done = sum(run.status == FINISHED for run in model.runs)
    others = [
        f"{amount} {status}" for status in STATUSES[1:] if (amount := sum(run.status == status for run in model.runs))
    ]
    return " + ".join([*([str(done)] if done else []), *others])
