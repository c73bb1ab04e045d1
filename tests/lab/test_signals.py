"""Real signals, sent at random moments to a real run of the trainer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncgru.lab.checkpoint import load_latest, unflatten
from ncgru.lab.rundir import read_log
from ncgru.lab.stopping import StopFlag, stop_on_signals
from ncgru.lab.trainer import Trainer
from tests.lab.forked_training import Trainee, signalled_recipe
from tests.lab.small_runs import timeless_log
from tests.lab.test_resume import assert_equal

ENDLESS = 10**6
KILLS = 25


@pytest.fixture(scope="module")
def trainee() -> Iterator[Trainee]:
    trainee = Trainee()
    yield trainee
    trainee.close()


def saved_step(path: Path) -> int:
    found = load_latest(path / "checkpoints")
    return 0 if found is None else found.step


def assert_as_without_interruption(path: Path) -> None:
    """Log and state up to the last checkpoint are those of a plain loop."""
    found = load_latest(path / "checkpoints")
    assert found is not None
    trainer = Trainer(signalled_recipe(ENDLESS), 0)
    means = {}
    while trainer.position < found.step:
        step = trainer.advance()
        if step % 3 == 0:
            means[step] = trainer.window_mean()
    logged = {r["step"]: r["loss"] for r in timeless_log(path) if r["kind"] == "train" and r["step"] <= found.step}
    assert logged == means
    resumed = Trainer(signalled_recipe(ENDLESS), 0)
    resumed.restore(unflatten(found.tensors, found.meta["state"]))
    assert_equal(resumed.optimizers.state_dict(), trainer.optimizers.state_dict())
    # Whether a measurement has already brought the matrices up to date may differ.
    assert resumed.measure()["orthogonality"] == trainer.measure()["orthogonality"]
    assert_equal(dict(resumed.model.state_dict()), dict(trainer.model.state_dict()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    trainee: Trainee, number: signal.Signals, tmp_path: Path
) -> None:
    reached = 0
    for _ in range(3):
        trainee.start(tmp_path / "run", ENDLESS)
        trainee.wait("at")
        *said, code = trainee.signal_after(number, 0.3)
        word, status, step, reason = said[-1].split(maxsplit=3)
        assert (word, status, code) == ("result", "stopped", "ended 0")
        assert reason == f"{number.name}; the same command goes on from step {step}"
        assert saved_step(tmp_path / "run") == int(step) > reached
        reached = int(step)
    assert read_log(tmp_path / "run")[-1]["status"] == "stopped"
    assert_as_without_interruption(tmp_path / "run")


def test_killed_at_any_moment_a_run_loses_at_most_the_last_interval(trainee: Trainee, tmp_path: Path) -> None:
    path = tmp_path / "run"
    for kill in range(KILLS):
        before = saved_step(path)
        trainee.start(path, ENDLESS)
        heard: list[str] = []
        # Every second run lives to its next checkpoint; so they come forward on any machine, however busy it is.
        while kill % 2 and (not heard or int(heard[-1].split()[1]) <= before + 5):
            heard += trainee.wait("at")
        *said, code = trainee.signal_after(signal.SIGKILL, 0.35)
        assert code == f"ended {-signal.SIGKILL}"
        steps = [int(line.split()[1]) for line in heard + said if line.startswith("at")]
        if steps:
            assert steps[0] == before
            assert saved_step(path) >= steps[-1] - 5
        assert saved_step(path) >= before
    assert saved_step(path) >= KILLS // 2 * 5
    # One that ends in order, as the log of a killed one goes beyond its checkpoint.
    trainee.start(path, ENDLESS)
    trainee.wait("at")
    trainee.signal_after(signal.SIGTERM, 0.1)
    assert_as_without_interruption(path)


def test_the_handlers_are_put_back_and_a_second_interrupt_is_immediate() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals(StopFlag()) as flag:
        signal.raise_signal(signal.SIGINT)
        assert flag
        assert flag.reason == "SIGINT"
        signal.raise_signal(signal.SIGTERM)
        assert flag.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_stop_is_acknowledged_once() -> None:
    heard = []
    with stop_on_signals(StopFlag(lambda: heard.append("heard"))) as flag:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        flag.set("enough")
    assert heard == ["heard"]


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def look() -> None:
        with stop_on_signals(StopFlag()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
