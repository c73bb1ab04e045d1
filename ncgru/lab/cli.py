"""The command `ncgru`: list recipes, train them, compare models, report, look at the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncgru.lab.errors import LabError, OtherRecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ncgru.lab.journal import Result
    from ncgru.lab.recipes import Recipe

FINISHED, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all well; a run failed (its loss was not finite); bad input; stopped, and can go on."""

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
    """Run the command; expected errors are shown on one screen, without a traceback unless --debug is given."""
    try:
        app()
    except (LabError, ValueError, TypeError, OSError) as error:
        if "--debug" in sys.argv:
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
    """Options before the command; `main` reads --debug itself, because it must know before parsing has succeeded."""


def _complete_recipe(incomplete: str) -> list[str]:
    from ncgru.lab import recipes

    return [name for name in recipes.names() if name.startswith(incomplete)]


def _complete_task(incomplete: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in _complete_recipe(incomplete)})


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a field of the recipe, e.g. hidden_size=64."),
]
SeedCount = Annotated[int | None, typer.Option("--seeds", min=1, help="Run seeds 0 to N-1.")]
OneSeed = Annotated[list[int] | None, typer.Option("--seed", help="Run this seed; may be repeated.")]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller form for a CPU: fewer steps, shorter sequences.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:<number>.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where run directories are made.")]
Engine = Annotated[str, typer.Option(help="local: one run after the other; ray: spread over a Ray cluster.")]
RayAddress = Annotated[str | None, typer.Option(help="Ray: address of a running cluster; else one is started here.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads of a run; more than 1 pays for large models only.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list", epilog="Examples: ncgru list    ncgru list adding-200    ncgru list '*/nc-gru-*' --json")
def list_recipes(
    pattern: Annotated[
        str | None, typer.Argument(help="A task, or a shell pattern.", autocompletion=_complete_task)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the recipes: what is trained, the paper's number, and about how long it takes on this machine's CPU."""
    from ncgru.lab import estimate, recipes

    found = recipes.find(pattern) if pattern else [recipes.get(name) for name in recipes.names()]
    rows = [(recipe, estimate.seconds(recipe)) for recipe in found]
    if as_json:
        for recipe, seconds in rows:
            typer.echo(json.dumps({**recipe.to_dict(), "expected_seconds": seconds}))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column, justify in (("recipe", "left"), ("model", "left"), ("steps", "right"), ("paper", "right")):
        table.add_column(column, justify=justify, no_wrap=column == "recipe")  # type: ignore[arg-type]
    table.add_column("CPU time here", justify="right")
    for recipe, seconds in rows:
        paper = "–" if recipe.paper is None else f"{recipe.paper.text} {recipe.paper.unit}"
        table.add_row(recipe.name, _model(recipe), f"{recipe.steps:,}", paper, _about(seconds))
    _console().print(table)


@app.command(
    epilog="Examples: ncgru train adding-200/nc-gru-c    "
    "ncgru train parenthesis-100/gru --set hidden_size=64 --seeds 8    "
    "torchrun --nproc-per-node 2 -m ncgru.lab train ptb-char/lstm",
)
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe; see `ncgru list`.", autocompletion=_complete_recipe)],
    settings: Settings = None,
    seeds: SeedCount = None,
    seed: OneSeed = None,
    quick: Quick = False,
    device: Device = "cpu",
    out: Out = Path("runs"),
    engine: Engine = "local",
    ray_address: RayAddress = None,
    threads: Threads = 1,
    other_recipe: Annotated[
        bool, typer.Option("--other-recipe", help="Go on with these settings though the run began with others.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe, or go on with it: the same command resumes where the last one stopped."""
    from ncgru.lab import recipes

    chosen = recipes.get(recipe)
    chosen = (chosen.quick() if quick else chosen).with_settings(_pairs(settings))
    how = {"engine": engine, "device": device, "address": ray_address, "allow_other_recipe": other_recipe}
    results = _run([chosen], _seeds(seeds, seed), out, threads, quiet=as_json, **how)
    _finish(results, out, as_json)


@app.command(
    epilog="Examples: ncgru compare parenthesis-100 --models nc-gru-c,gru,lstm --quick    "
    "ncgru compare adding-200 --models nc-gru-c,gru --seeds 4",
)
def compare(
    task: Annotated[str, typer.Argument(help="A task, such as parenthesis-100.", autocompletion=_complete_task)],
    models: Annotated[str, typer.Option(help="Models by name, separated by commas.")] = "nc-gru-c,gru,lstm",
    settings: Settings = None,
    seeds: SeedCount = None,
    seed: OneSeed = None,
    quick: Quick = False,
    device: Device = "cpu",
    out: Out = Path("runs"),
    engine: Engine = "local",
    ray_address: RayAddress = None,
    threads: Threads = 1,
) -> None:
    """Train several models on one task, and write a report that compares them."""
    from ncgru.lab import recipes
    from ncgru.lab.report import comparison_table, load_runs, write_report
    from ncgru.lab.rundir import run_path

    names = [f"{task}/{model.strip()}" for model in models.split(",") if model.strip()]
    if not names:
        raise ValueError("models must name at least one model, got none; pass for example --models nc-gru-c,gru")
    chosen = [recipes.get(name) for name in names]
    chosen = [(r.quick() if quick else r).with_settings(_pairs(settings)) for r in chosen]
    wanted = _seeds(seeds, seed)
    results = _run(chosen, wanted, out, threads, engine=engine, device=device, address=ray_address)
    paths = [run_path(out, r.name, k) for r in chosen for k in (wanted or r.seeds)]
    runs = load_runs(*(path for path in paths if path.exists()))
    _console().print(comparison_table(runs))
    files = write_report([path for path in paths if path.exists()], out / "report")
    typer.echo(f"report: {files.page.resolve()}")
    _finish(results, out, as_json=False, table=False)


@app.command(epilog="Examples: ncgru report runs/    ncgru report runs/adding-200 results/ --out adding-report")
def report(
    paths: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or result files (JSON lines).")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the report goes.")] = Path("report"),
    figures: Annotated[bool, typer.Option(help="Also write figures as PNG and PDF.")] = True,
    export: Annotated[Path | None, typer.Option(help="Also write the runs into this compact result file.")] = None,
) -> None:
    """Write one HTML page with interactive plots and tables, and figures for papers."""
    from ncgru.lab.report import comparison_table, export_results, load_runs, write_report

    found = paths or [Path("runs")]
    runs = load_runs(*found)
    _console().print(comparison_table(runs))
    files = write_report(found, out, figures=figures)
    if export is not None:
        typer.echo(f"results: {export_results(runs, export)}")
    typer.echo(f"report: {files.page.resolve()}")


@app.command(epilog="Examples: ncgru doctor    ncgru doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine can run: which backend and why, packages, data."""
    from ncgru.lab.doctor import examine

    found = examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found["machine"].items():
        table.add_row(name, ", ".join(value) or "none" if isinstance(value, list) else str(value))
    for device, backends in found["devices"].items():
        table.add_row(f"backend on {device}", f"{backends['auto']}: {backends['reason']}")
        for name, verdict in backends["by_name"].items():
            table.add_row(f"  {name}", verdict)
    for name, version in found["packages"].items():
        table.add_row(name, version or "not installed")
    penn = found["penn_treebank"]
    table.add_row("Penn Treebank", penn["folder"] or penn["problem"])
    _console().print(table, markup=False)


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

    from ncgru.lab.engines import run_many
    from ncgru.lab.progress import Several, TensorBoard, watching

    torch.set_num_threads(threads)
    with watching(_console(stderr=quiet)) as shown:
        return run_many(chosen, seeds, root=out, listener=Several([shown, TensorBoard(out)]), **how)


def _finish(results: Sequence[Result], out: Path, as_json: bool, table: bool = True) -> None:
    """Print how the runs ended, and leave with the exit code that says it."""
    from ncgru.lab.rundir import run_path

    if as_json:
        for result in results:
            place = run_path(out, result.name, result.seed)
            typer.echo(json.dumps({**result._asdict(), "directory": str(place)}))
    elif table:
        _print_results(results, out)
    statuses = {result.status for result in results}
    if "stopped" in statuses:
        raise typer.Exit(INTERRUPTED)
    if "failed" in statuses:
        raise typer.Exit(FAILED)


def _print_results(results: Sequence[Result], out: Path) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "seed", "status", "steps", "best", "last"):
        table.add_column(column, justify="left" if column in ("recipe", "status") else "right", overflow="fold")
    for result in results:
        numbers = ["–" if x is None else f"{x:.4g}" for x in (result.headline_min, result.headline_final)]
        table.add_row(result.name, str(result.seed), result.status, f"{result.step:,}", *numbers)
    _console().print(table)
    for result in results:
        if result.reason:
            typer.echo(f"{result.name} seed {result.seed} {result.status}: {result.reason}")
    if all(result.status == "finished" for result in results):
        typer.echo(f"look at it with: ncgru report {out}")


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


def _model(recipe: Recipe) -> str:
    """The model in a few words."""
    spec = recipe.model
    sizes = ", ".join(map(str, spec.hidden_sizes))
    return f"{spec.kind}({spec.orthogonal or 'none'}) {sizes}" if spec.kind == "nc-gru" else f"{spec.kind} {sizes}"


def _about(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"≈ {seconds / size:.0f} {unit}"
    return f"≈ {max(seconds, 1):.0f} s"


def _console(stderr: bool = False, **settings: Any) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, **settings)
