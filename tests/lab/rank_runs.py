"""What each of two processes does that `torchrun` has started, for tests/lab/test_distributed.py."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from ncgru.lab.distributed import process_group
from ncgru.lab.errors import LabError
from ncgru.lab.rundir import RunDirectory
from ncgru.lab.stopping import StopFlag
from ncgru.lab.trainer import Trainer, train
from tests.lab.small_runs import StopAfter, small_recipe, text_recipe

MODELS = ("lstm", "nc-gru-rc")
STEPS = 12


def main(folder: Path) -> None:
    """Train in lockstep, stop and resume, meet an error; leave in `folder` what the test looks at."""
    with process_group("cpu") as ranks:
        for model in MODELS:
            trainer = Trainer(small_recipe(model, clip=0.5), 0, ranks=ranks)
            for _ in range(STEPS):
                trainer.advance()
            save_file(dict(trainer.model.state_dict()), folder / f"{model}-rank-{ranks.rank}.safetensors")
        recipe = small_recipe()
        train(recipe, folder / "straight", 0)
        # Only the second process is asked; both have to stop, after the same step.
        stopped = train(recipe, folder / "pieces", 0, stop=StopAfter(1) if ranks.rank == 1 else StopFlag())
        assert (stopped.status, stopped.step) == ("stopped", 10), stopped
        assert train(recipe, folder / "pieces", 0).status == "finished"
        text_run = text_recipe(folder / f"fox-{ranks.rank}.txt", steps=15)
        ranks.gather(None)  # now both texts, which are the same, are written
        text_run = text_run.variant("shared", "", task={"train": str(folder / "fox-0.txt")})
        train(text_run, folder / "text-straight", 0)
        train(text_run, folder / "text-pieces", 0, stop=StopAfter(1))
        train(text_run, folder / "text-pieces", 0)
        held = ranks.leads and RunDirectory.open(folder / "held", recipe, 0)
        try:
            train(recipe, folder / "held", 0)
        except LabError as error:
            Path(folder, f"error-{ranks.rank}").write_text(str(error), encoding="utf-8")
        if held:
            held.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
