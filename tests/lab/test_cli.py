"""The command as it is typed: what it prints, what it leaves on the disk, and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from ncgru.lab import cli
from ncgru.lab.journal import Result

SETTINGS = ["steps=6", "length=8", "hidden_size=5", "log_every=2", "eval_every=3", "test_size=8", "eval_batch_size=4"]
TINY = [part for setting in SETTINGS for part in ("--set", setting)]


def start(*args: str, cwd: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "110"}
    environment["NCGRU_DATA"] = str(cwd)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "ncgru.lab", *args],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ncgru(*args: str, cwd: Path, code: int = 0) -> str:
    """Output of the command, errors included, which must end with this exit code."""
    with start(*args, cwd=cwd) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    return out + err


def test_help_shows_examples(tmp_path: Path) -> None:
    assert "compare parenthesis-100 --models nc-gru-c,gru,lstm --quick" in ncgru("--help", cwd=tmp_path)
    for command in ("list", "train", "compare", "report", "doctor"):
        assert f"\n  ncgru {command}" in ncgru(command, "--help", cwd=tmp_path), "a line of its own"


def test_list_as_table_and_json(tmp_path: Path) -> None:
    table = ncgru("list", "adding-200", cwd=tmp_path)
    assert "adding-200/nc-gru-c" in table
    assert "1.022" in table
    rows = [json.loads(line) for line in ncgru("list", "adding-200/gru", "--json", cwd=tmp_path).splitlines()]
    assert [row["name"] for row in rows] == ["adding-200/gru"]
    assert rows[0]["expected_seconds"] > 0


def test_doctor_says_which_backend_and_why(tmp_path: Path) -> None:
    assert "backend on cpu" in ncgru("doctor", cwd=tmp_path)
    found = json.loads(ncgru("doctor", "--json", cwd=tmp_path))
    assert found["devices"]["cpu"]["auto"] == "reference"
    assert found["devices"]["cpu"]["orthogonal_update"].startswith("by torch operations")
    assert found["gpu_kernels"]["nvrtc"]["problem"] is None
    assert found["penn_treebank"]["problem"]


def test_train_then_again_then_longer(tmp_path: Path) -> None:
    recipe = ["train", "parenthesis-100/nc-gru-c", "--set", "negatives=2"]
    first = ncgru(*recipe, *TINY, "--seeds", "2", cwd=tmp_path)
    assert first.count("finished") == 4, "two lines and two rows"
    run = tmp_path / "runs/parenthesis-100/nc-gru-c/seed-1"
    log = (run / "log.jsonl").read_text()
    assert any((run / "tensorboard").iterdir())
    ncgru(*recipe, *TINY, "--seeds", "2", cwd=tmp_path)
    assert (run / "log.jsonl").read_text() == log, "a finished run is left alone"
    longer = [*recipe, *[x.replace("steps=6", "steps=8") for x in TINY], "--seed", "1"]
    refusal = ncgru(*longer, cwd=tmp_path, code=2)
    assert "steps: 6 there, 8 asked for" in refusal
    assert "--other-recipe" in refusal
    results = ncgru(*longer, "--other-recipe", "--json", cwd=tmp_path).splitlines()
    assert [json.loads(line)["step"] for line in results if line.startswith("{")] == [8]


def test_under_torchrun_one_process_speaks(tmp_path: Path) -> None:
    paths = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ncgru.lab"]
    done = subprocess.run(
        [*command, "train", "parenthesis-100/gru", *TINY], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2, "a line and a row of the table"


def test_compare_writes_a_report(tmp_path: Path) -> None:
    out = ncgru("compare", "parenthesis-100", "--models", "cho-gru,gru", *TINY, cwd=tmp_path)
    page = next(line for line in out.splitlines() if line.startswith("report: ")).removeprefix("report: ")
    assert Path(page).is_file()
    assert "cho-gru" in Path(page).read_text()
    longer = ["--models", "cho-gru,gru,lstm", *[x.replace("steps=6", "steps=8") for x in TINY]]
    refusal = ncgru("compare", "parenthesis-100", *longer, cwd=tmp_path, code=2)
    assert "steps: 6 there, 8 asked for" in refusal
    assert not (tmp_path / "runs/parenthesis-100/lstm").exists()
    with start("compare", "parenthesis-100", *longer, "--other-recipe", "--json", cwd=tmp_path) as process:
        told, aside = process.communicate(timeout=120)
    assert [json.loads(line)["step"] for line in told.splitlines()] == [8, 8, 8], aside
    assert f"report: {page}" in aside
    again = ncgru("report", "runs", "--no-figures", "--export", "results.jsonl", cwd=tmp_path)
    assert "report: " in again
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
    assert "report: " in ncgru("report", "results.jsonl", "--out", "other", cwd=tmp_path)


LONG = ["--set", "steps=100000", "--set", "length=8", "--seeds", "2"]


@pytest.mark.parametrize(
    ("command", "report"),
    [(["train", "parenthesis-100/gru"], False), (["compare", "parenthesis-100", "--models", "gru"], True)],
    ids=["train", "compare"],
)
def test_sigint_saves_and_the_same_command_goes_on(command: list[str], report: bool, tmp_path: Path) -> None:
    with start(*command, *LONG, cwd=tmp_path) as process:
        log = tmp_path / "runs/parenthesis-100/gru/seed-0/log.jsonl"
        deadline = time.monotonic() + 60
        while not (log.exists() and '"train"' in log.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "gru seed 0 stopped: SIGINT; the same command goes on from step" in out
    assert "1 of 2 runs have not begun; the same command makes them too" in out
    assert ("report: " in out) == report
    assert "stopping after this step" in err
    assert "Traceback" not in err


def test_a_stop_that_lets_the_last_step_finish_is_still_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("typer.echo", lambda line, err: told.append(line))
    done = Result("small/gru", 0, "finished", 24, 0.1, 0.2, None, 1.0)
    cli._finish([done], 1, "look at it")
    with pytest.raises(typer.Exit) as ended:
        cli._finish([done], 3, "look at it")
    assert ended.value.exit_code == cli.INTERRUPTED
    assert told == ["look at it", "2 of 3 runs have not begun; the same command makes them too"]


WRONG = [
    (["train", "adding-200/nc-gru-d"], "did you mean"),
    (["train", "adding-200/gru", "--set", "hiden_size=4"], "hidden_size"),
    (["train", "adding-200/gru", "--set", "steps=many"], "steps must"),
    (["train", "adding-200/gru", "--set", "steps"], "--set must be key=value"),
    (["train", "adding-200/gru", "--set", "steps=2", "--set", "steps=3"], "given once"),
    (["train", "adding-200/gru", "--set", "learning_rate=0"], "must be above 0"),
    (["train", "adding-200/gru", "--set", "lr=nan"], "must be finite"),
    (["train", "adding-200/gru", "--set", "length=2"], "length must be at least 3"),
    (["train", "adding-200/gru", "--device", "cuda"], "device"),
    (["train", "adding-200/gru", "--device", "tpu"], "device must be cpu, cuda"),
    (["train", "adding-200/gru", "--out", "file"], "file"),
    (["train", "adding-200/gru", "--seeds", "2", "--seed", "1"], "must not be given together"),
    (["train", "adding-200/gru", "--seed", "-1"], "--seed"),
    (["train", "adding-200/gru", "--engine", "rai"], "did you mean 'ray'"),
    (["compare", "adding-200", "--models", ","], "models must name at least one"),
    (["list", "ading-200"], "did you mean 'adding-200'"),
    (["report", "nowhere"], "nowhere"),
    (["report", "file"], "there are none in file"),
]


@pytest.mark.parametrize(("args", "message"), WRONG)
def test_bad_input_is_one_screen_exit_code_2_and_nothing_half_written(
    args: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    shown = ncgru(*args, cwd=tmp_path, code=2)
    assert message in shown
    assert "Traceback" not in shown
    assert len(shown.splitlines()) < 20
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("co", ["compare"]),
        ("train copying-1000/nc", ["copying-1000/nc-gru-c", "copying-1000/nc-gru-rc", "copying-1000/nc-gru-ruc"]),
        ("compare ptb", ["ptb-char", "ptb-word"]),
        ("compare adding-200 --models gru,l", ["gru,lstm"]),
        ("compare nothing --models l", []),
        ("train adding-200/gru --set le", ["learning_rate=", "length="]),
        ("train text-char/gru --seeds 2 --set te", ["test=", "text="]),
        ("train nothing --set st", []),
        ("train adding-200/gru --engine r", ["ray"]),
        ("train adding-200/gru --device c", ["cpu", "cuda"]),
    ],
)
def test_the_tab_key_completes(
    words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_NCGRU_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ncgru {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    with pytest.raises(SystemExit):
        cli.app([], prog_name="ncgru")
    assert capsys.readouterr().out.split() == offered


@pytest.mark.parametrize("args", [("--debug", "train", "nothing"), ("train", "nothing", "--debug")])
def test_debug_shows_the_traceback(args: tuple[str, ...], tmp_path: Path) -> None:
    assert "Traceback" in ncgru(*args, cwd=tmp_path, code=1)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 80)
    settings = [
        "text=my.txt",
        "steps=4",
        "eval_every=2",
        "batch_size=2",
        "eval_batch_size=1",
        "bptt=9",
        "hidden_size=6",
    ]
    arguments = [part for setting in [*settings, "embedding=6", "negatives=2"] for part in ("--set", setting)]
    assert "finished" in ncgru("train", "text-char/nc-gru-c", *arguments, cwd=tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    for name, message in {"empty.txt": "is empty", "latin.txt": "must be UTF-8", "no.txt": "does not exist"}.items():
        shown = ncgru("train", "text-word/gru", "--set", f"text={name}", cwd=tmp_path, code=2)
        assert message in shown
    assert not (tmp_path / "runs/text-word").exists()


def test_missing_treebank_says_where_it_was_looked_for(tmp_path: Path) -> None:
    shown = ncgru("train", "ptb-char/lstm", cwd=tmp_path, code=2)
    assert "ptb.train.txt" in shown
    assert str(tmp_path) in shown
    assert list(tmp_path.iterdir()) == []


def test_a_treebank_of_another_content_is_refused(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text("not the treebank\n")
    shown = ncgru("train", "ptb-word/gru", "--quick", cwd=tmp_path, code=2)
    assert "ptb.train.txt must have SHA-256 fcea919f" in shown
    assert len(list(tmp_path.iterdir())) == 3
