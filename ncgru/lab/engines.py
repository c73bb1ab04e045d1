"""Many runs, recipes times seeds: one after the other here, or spread over a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import platform
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ncgru._checks import one_of
from ncgru.lab.distributed import process_group
from ncgru.lab.errors import LabError
from ncgru.lab.following import Follower
from ncgru.lab.journal import Listener, Result
from ncgru.lab.progress import Several
from ncgru.lab.recipes.recipe import Recipe
from ncgru.lab.rundir import check_run, run_path, run_status
from ncgru.lab.stopping import StopFlag, stop_on_signals
from ncgru.lab.trainer import train

ENGINES = ("local", "ray")
RETRIES = 5
"""How often Ray starts a run again whose worker was lost; it goes on from its last checkpoint."""
REACH_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""Between two looks at the logs of runs on Ray."""


class Job(NamedTuple):
    """One run: a recipe, a seed and where it lies."""

    recipe: Recipe
    seed: int
    path: Path


def run_many(
    recipes: Iterable[Recipe],
    seeds: Sequence[int] | None = None,
    *,
    root: Path | str = "runs",
    engine: str = "local",
    device: str = "cpu",
    resume: bool = True,
    allow_other_recipe: bool = False,
    listener: Listener | None = None,
    stop: StopFlag | None = None,
    address: str | None = None,
    recorder: Callable[[], Listener] | None = None,
) -> list[Result]:
    """Train every recipe with every seed; a seed that fails does not keep the others from going on.

    Args:
        recipes: what to train.
        seeds: with which seeds; None takes those of each recipe.
        root: run directories are made below it, see `rundir.run_path`.
        engine: "local" runs one after the other, "ray" as many at once as the cluster has room for. A Ray cluster of
            several machines needs `root` on a file system that all of them see.
        device: as in `train`; with Ray, every run on "cuda" gets a GPU of its own.
        resume: as in `train`.
        allow_other_recipe: as in `train`.
        listener: gets all records; with Ray, from the logs of the runs, and one made by `beside` for each.
        stop: set it to stop from elsewhere; signals do so too. Runs that have not begun are left out then.
        address: of a running Ray cluster; None starts one on this machine.
        recorder: makes another listener for each run, in the process that trains it; Ray must be able to pickle it.

    Returns:
        The results, in the order of recipes and seeds, of all runs that have begun.
    """
    one_of("engine", engine, ENGINES)
    jobs = [
        Job(recipe, seed, run_path(root, recipe.name, seed).absolute())
        for recipe in recipes
        for seed in (recipe.seeds if seeds is None else seeds)
    ]
    if len({job.path for job in jobs}) < len(jobs):
        raise ValueError("recipes and seeds must give each run a directory of its own, some came twice; name each once")
    if not resume:
        _refuse_begun(jobs)
    flag = StopFlag() if stop is None else stop
    if engine == "ray":
        return _run_on_ray(jobs, device, allow_other_recipe, listener, flag, address, recorder)
    return _run_in_a_row(jobs, device, allow_other_recipe, listener, flag, recorder)


def _refuse_begun(jobs: Sequence[Job]) -> None:
    begun = [str(job.path) for job in jobs if run_status(job.path) != "new"]
    if begun:
        raise LabError(f"runs have begun in {', '.join(begun)}; resume them, or choose another folder")


def _refuse_others(jobs: Sequence[Job], allow_other_recipe: bool) -> None:
    """Raise if one of the directories holds another recipe: before hours go into the runs ahead of it."""
    for job in jobs:
        check_run(job.path, job.recipe, job.seed, allow_other_recipe=allow_other_recipe)


def _run_in_a_row(
    jobs: Sequence[Job],
    device: str,
    allow_other_recipe: bool,
    listener: Listener | None,
    stop: StopFlag,
    recorder: Callable[[], Listener] | None,
) -> list[Result]:
    results: list[Result] = []
    with process_group(device) as ranks, stop_on_signals(stop):
        ranks.lead(lambda: _refuse_others(jobs, allow_other_recipe))
        for job in jobs:
            # Ranks may be told at different moments, but have to leave out the same runs.
            if ranks.any(bool(stop)):
                break
            listeners = Several([one for one in (listener, recorder and recorder()) if one])
            result = train(
                job.recipe, job.path, job.seed, device=device, allow_other_recipe=allow_other_recipe,
                listener=listeners, stop=stop,
            )  # fmt: skip
            results.append(result)
    return results


def _run_on_ray(
    jobs: Sequence[Job],
    device: str,
    allow_other_recipe: bool,
    listener: Listener | None,
    stop: StopFlag,
    address: str | None,
    recorder: Callable[[], Listener] | None,
) -> list[Result]:
    _refuse_others(jobs, allow_other_recipe)
    ray = _import_ray()
    if address is not None:
        _check_reachable(address)
    gpu = torch.device(device).type == "cuda"
    with ExitStack() as stack:
        if not ray.is_initialized():
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=address, include_dashboard=None if address else False, **quiet)
            stack.callback(ray.shutdown)
        # After `init`, which takes the signals for itself.
        stack.enter_context(stop_on_signals(stop))
        if gpu and not ray.cluster_resources().get("GPU"):
            raise LabError("device cuda was asked for, but the Ray cluster has no GPU; use device cpu")
        task = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=RETRIES)(_ray_task)
        pending = {
            task.remote(
                job.recipe.to_dict(), str(job.path), job.seed, "cuda" if gpu else "cpu", allow_other_recipe, recorder
            ): job
            for job in jobs
        }
        results = _collect(ray, pending, listener, stop)
    return [results[job.path] for job in jobs if job.path in results]


def _ray_task(
    recipe: dict[str, Any],
    path: str,
    seed: int,
    device: str,
    allow_other_recipe: bool,
    recorder: Callable[[], Listener] | None,
) -> Result:
    """One run in a Ray worker."""
    torch.set_num_threads(1)
    return train(
        Recipe.from_dict(recipe), path, seed, device=device, allow_other_recipe=allow_other_recipe,
        listener=recorder and recorder(),
    )  # fmt: skip


def _collect(ray: Any, pending: dict[Any, Job], listener: Listener | None, stop: StopFlag) -> dict[Path, Result]:
    """Wait for all tasks; after a stop or an error they are cancelled, which lets each save its state."""
    followers = {
        job.path: Follower(job.recipe, job.seed, job.path, (listener or Listener()).beside())
        for job in pending.values()
    }
    looked = time.monotonic()
    results: dict[Path, Result] = {}
    problem: LabError | ValueError | None = None
    cancelled = False
    while pending:
        if (stop or problem) and not cancelled:
            for reference in pending:
                ray.cancel(reference)
            cancelled = True
        done, _ = ray.wait(list(pending), timeout=0.5)
        if time.monotonic() - looked >= LOOK_SECONDS:
            for job in pending.values():
                followers[job.path].look()
            looked = time.monotonic()
        for reference in done:
            job = pending.pop(reference)
            try:
                result = ray.get(reference)
            except ray.exceptions.TaskCancelledError:
                continue  # it had not begun
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                problem = (
                    cause if isinstance(cause, (LabError, ValueError)) else LabError(f"{job.path} failed: {error}")
                )
            except ray.exceptions.RayError as error:
                problem = LabError(f"{job.path} was given up, its worker was lost too often; run it again ({error})")
            else:
                results[job.path] = result
                followers[job.path].look()
                followers[job.path].listener.on_end(result)
    if problem is not None:
        raise problem
    return results


def _check_reachable(address: str) -> None:
    """Raise if nobody answers at `host:port` or `ray://host:port`: Ray itself would try for minutes without a word."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto" and other words of Ray's
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise LabError(
            f"no Ray cluster answers at {address} ({error}); check the address that `ray start --head` has shown, "
            "or leave it out to start a cluster on this machine"
        ) from error


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise LabError(
            f"engine 'ray' needs Ray, which this Python ({platform.python_version()}) does not have; "
            'install it with pip install "ncgru[ray]", or use engine local'
        ) from error
