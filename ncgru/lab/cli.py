"""The command `ncgru`: list recipes, train them, compare models, report, look at the machine."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncgru.lab import completion
from ncgru.lab.errors import LabError, OtherRecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncgru.lab.journal import Result
    from ncgru.lab.recipes import Recipe

FINISHED, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all well; a run failed (its loss was not finite); bad input; stopped, and can go on."""


def _examples(*commands: str) -> str:
    """The end of a help text; the mark keeps each command on a line of its own."""
    return "\n".join(["Examples:", "", "\b", *commands])


app = typer.Typer(
    name="ncgru",
    help="The laboratory of ncgru: train recurrent networks with orthogonal matrices and look at the results.",
    epilog="Start with: ncgru compare parenthesis-100 --models nc-gru-c,gru,lstm --quick",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command; expected errors are shown on one screen, without a traceback unless --debug is given.

    `--debug` is taken at any place, as it is usually added to the end of a command that has just failed.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except (LabError, ValueError, TypeError, OSError) as error:
        if len(arguments) < len(sys.argv) - 1:
            raise
        advice = "\n(here that is the option --other-recipe)" if isinstance(error, OtherRecipeError) else ""
        typer.echo(f"ncgru: {error}{advice}", err=True)
        sys.exit(MISUSED)


def _version(value: bool) -> None:
    if value:
        import ncgru

        typer.echo(f"ncgru {ncgru.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command; --debug stands here for the help alone, `main` has read it."""


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", autocompletion=completion.setting,
        help="Change a field of the recipe, e.g. hidden_size=64; `ncgru list RECIPE --json` shows them all.",
    ),
]  # fmt: skip
SeedCount = Annotated[int | None, typer.Option("--seeds", min=1, help="Run seeds 0 to N-1.")]
OneSeed = Annotated[list[int] | None, typer.Option("--seed", min=0, help="Run this seed; may be repeated.")]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller form for a CPU: fewer steps, shorter sequences.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>.", autocompletion=completion.device)]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where run directories are made.")]
Engine = Annotated[
    str,
    typer.Option(
        help="local: one run after the other; ray: spread over a Ray cluster.", autocompletion=completion.engine
    ),
]
RayAddress = Annotated[str | None, typer.Option(help="Ray: address of a running cluster; else one is started here.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of a run; more than 1 pays for large models only.")]
OtherRecipe = Annotated[
    bool, typer.Option("--other-recipe", help="Go on with these settings though the run began with others.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command(
    "list",
    short_help="Show the recipes.",
    epilog=_examples("ncgru list", "ncgru list adding-200", "ncgru list '*/nc-gru-*' --json"),
)
def list_recipes(
    pattern: Annotated[
        str | None, typer.Argument(help="A task, or a shell pattern.", autocompletion=completion.task)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the recipes: hidden units, steps, the paper's number, and about how long it takes on this machine's CPU."""
    from ncgru.lab import estimate, recipes, screen

    found = recipes.find(pattern) if pattern else [recipes.get(name) for name in recipes.names()]
    rows = [(recipe, estimate.seconds(recipe)) for recipe in found]
    if as_json:
        for recipe, seconds in rows:
            typer.echo(json.dumps({**recipe.to_dict(), "expected_seconds": seconds}))
        return
    shown = screen.console(wide=True)
    for number, table in enumerate(screen.recipe_tables(rows)):
        if number:
            shown.print()
        shown.print(table)


@app.command(
    short_help="Train a recipe, or go on with it.",
    epilog=_examples(
        "ncgru train adding-200/nc-gru-c",
        "ncgru train parenthesis-100/gru --set hidden_size=64 --seeds 8",
        "ncgru train text-char/nc-gru-c --set text=my.txt",
        "torchrun --nproc-per-node 2 -m ncgru.lab train ptb-char/lstm",
    ),
)
def train(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe; see `ncgru list`.", autocompletion=completion.recipe)
    ],
    settings: Settings = None,
    seeds: SeedCount = None,
    seed: OneSeed = None,
    quick: Quick = False,
    device: Device = "cpu",
    out: Out = Path("runs"),
    engine: Engine = "local",
    ray_address: RayAddress = None,
    threads: Threads = 1,
    other_recipe: OtherRecipe = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, or go on with it: the same command resumes where the last one stopped."""
    from ncgru.lab import recipes, screen

    chosen = recipes.get(recipe)
    chosen = (chosen.quick() if quick else chosen).with_settings(_pairs(settings))
    how = {"engine": engine, "device": device, "address": ray_address, "allow_other_recipe": other_recipe}
    wanted = _seeds(seeds, seed) or chosen.seeds
    results = _run([chosen], wanted, out, threads, quiet=as_json, **how)
    if as_json:
        _print_json(results, out)
    elif _leads():
        screen.console().print(screen.result_table(results))
    _finish(results, len(wanted), f"look at it with: ncgru report {out}", quiet=as_json)


@app.command(
    short_help="Train several models on one task, and report.",
    epilog=_examples(
        "ncgru compare parenthesis-100 --models nc-gru-c,gru,lstm --quick",
        "ncgru compare adding-200 --models nc-gru-c,gru --seeds 4",
    ),
)
def compare(
    task: Annotated[str, typer.Argument(help="A task, such as parenthesis-100.", autocompletion=completion.task)],
    models: Annotated[
        str, typer.Option(help="Models by name, separated by commas.", autocompletion=completion.models)
    ] = "nc-gru-c,gru,lstm",
    settings: Settings = None,
    seeds: SeedCount = None,
    seed: OneSeed = None,
    quick: Quick = False,
    device: Device = "cpu",
    out: Out = Path("runs"),
    engine: Engine = "local",
    ray_address: RayAddress = None,
    threads: Threads = 1,
    other_recipe: OtherRecipe = False,
    as_json: AsJson = False,
) -> None:
    """Train several models on one task, and write a report that compares them."""
    from ncgru.lab import recipes
    from ncgru.lab.rundir import run_path

    names = [f"{task}/{model.strip()}" for model in models.split(",") if model.strip()]
    if not names:
        raise ValueError("models must name at least one model, got none; pass for example --models nc-gru-c,gru")
    chosen = [recipes.get(name) for name in names]
    chosen = [(r.quick() if quick else r).with_settings(_pairs(settings)) for r in chosen]
    how = {"engine": engine, "device": device, "address": ray_address, "allow_other_recipe": other_recipe}
    wanted = _seeds(seeds, seed)
    results = _run(chosen, wanted, out, threads, quiet=as_json, **how)
    if as_json:
        _print_json(results, out)
    paths = [run_path(out, r.name, k) for r in chosen for k in (wanted or r.seeds)]
    begun = [path for path in paths if (path / "log.jsonl").exists()]
    if begun and _leads():
        _compared(begun, out / "report", quiet=as_json)
    _finish(results, len(paths), quiet=as_json)


@app.command(
    short_help="Write tables, plots and figures of runs.",
    epilog=_examples("ncgru report runs/", "ncgru report runs/adding-200 results/ --out adding-report"),
)
def report(
    paths: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or result files (JSON lines).")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the report goes.")] = Path("report"),
    figures: Annotated[bool, typer.Option(help="Also write figures as PNG and PDF.")] = True,
    export: Annotated[Path | None, typer.Option(help="Also write the runs into this compact result file.")] = None,
) -> None:
    """Write one HTML page with interactive plots and tables, and figures for papers."""
    from ncgru.lab import screen
    from ncgru.lab.report import comparison_table, export_results, load_runs, write_report

    found = paths or [Path("runs")]
    runs = load_runs(*found)
    for problem in runs.problems:
        typer.echo(f"ncgru: {problem}", err=True)
    screen.console().print(comparison_table(runs))
    files = write_report(found, out, figures=figures)
    if export is not None:
        typer.echo(f"results: {export_results(runs, export)}")
    typer.echo(f"report: {files.page.resolve()}")


@app.command(
    short_help="Show what this machine can run, and why.", epilog=_examples("ncgru doctor", "ncgru doctor --json")
)
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can run: which backend and why, packages, data."""
    from ncgru.lab import screen
    from ncgru.lab.doctor import examine

    found = examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    screen.console().print(screen.doctor_table(found), markup=False)


def _run(
    chosen: Sequence[Recipe],
    seeds: tuple[int, ...] | None,
    out: Path,
    threads: int,
    *,
    quiet: bool = False,
    **how: Any,
) -> list[Result]:
    """Train all recipes with all seeds as `run_many` does, and show how it goes."""
    import torch

    from ncgru.lab import screen
    from ncgru.lab.engines import run_many
    from ncgru.lab.progress import TensorBoard, watching
    from ncgru.lab.stopping import StopFlag

    torch.set_num_threads(threads)
    stop = StopFlag(_acknowledge)
    with watching(screen.console(stderr=quiet)) as shown:
        recorder = functools.partial(TensorBoard, out.absolute())
        return run_many(chosen, seeds, root=out, listener=shown, recorder=recorder, stop=stop, **how)


def _leads() -> bool:
    """Whether this process speaks: under torchrun one does for all."""
    return os.environ.get("RANK", "0") == "0"


def _acknowledge() -> None:
    """Say that a signal was heard, as a step of a large model takes its time.

    A signal may come while Python's own files are written to, so they are not used.
    """
    if _leads():
        os.write(2, b"\nncgru: stopping after this step; Ctrl-C again stops at once, without saving\n")


def _compared(paths: Sequence[Path], out: Path, quiet: bool) -> None:
    """Write the report of these runs, show its tables unless told not to, and say where it lies."""
    from ncgru.lab import screen
    from ncgru.lab.report import comparison_table, load_runs, write_report

    if not quiet:
        screen.console().print(comparison_table(load_runs(*paths)))
    files = write_report(paths, out)
    typer.echo(f"report: {files.page.resolve()}", err=quiet)


def _print_json(results: Sequence[Result], out: Path) -> None:
    from ncgru.lab.rundir import run_path

    for result in results if _leads() else ():
        place = run_path(out, result.name, result.seed)
        typer.echo(json.dumps({**result._asdict(), "directory": str(place)}))


def _finish(results: Sequence[Result], wanted: int, advice: str = "", *, quiet: bool = False) -> None:
    """Say why runs ended early, or what to do next, and leave with the exit code that tells how it went."""
    lines = [f"{r.name} seed {r.seed} {r.status}: {r.reason}" for r in results if r.reason]
    if len(results) < wanted:
        lines.append(f"{wanted - len(results)} of {wanted} runs have not begun; the same command makes them too")
    if advice and not lines and not quiet:
        lines.append(advice)
    for line in lines if _leads() else ():
        typer.echo(line, err=quiet)
    statuses = {result.status for result in results}
    # A stop during the last step of a run lets that run finish, and those behind it wait.
    if "stopped" in statuses or len(results) < wanted:
        raise typer.Exit(INTERRUPTED)
    if "failed" in statuses:
        raise typer.Exit(FAILED)


def _pairs(settings: list[str] | None) -> dict[str, str]:
    """`--set key=value` texts as a dictionary."""
    pairs = {}
    for text in settings or []:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ValueError(f"--set must be key=value, got {text!r}; pass for example --set hidden_size=64")
        if key in pairs:
            raise ValueError(f"--set {key} must be given once, got it twice; leave one out")
        pairs[key] = value
    return pairs


def _seeds(count: int | None, single: list[int] | None) -> tuple[int, ...] | None:
    """The seeds that were asked for; None for those of the recipe."""
    if count is not None and single:
        raise ValueError("--seeds and --seed must not be given together; use one of them")
    if count is not None:
        return tuple(range(count))
    return tuple(single) if single else None
