"""The paper's parenthesis task with T = 100: NC-GRU(U_c), 56 units, batch 16, Adam 1e-3, 40 negatives, exact every 50.

Prints the smallest mean training loss over 100 iterations, the paper's measure (0.286e-3 in its table), and exits with
an error unless it is below --bound. Takes some minutes on one core.

    python benchmarks/parenthesis.py --iterations 20000 --seed 0
"""

import argparse
import json
import sys
import time

import torch

import ncgru
from ncgru.lab.tasks import Parenthesis

WINDOW = 100
MEASURE_EVERY = 99  # no multiple of a reset, after which the error is always small


def train(iterations: int, seed: int, inverse: str) -> dict[str, float]:
    """Train once, printing the mean loss of every tenth window, and return what there is to say."""
    torch.manual_seed(seed)
    task = Parenthesis(length=100)
    source = task.source("train", batch_size=16, seed=seed)
    rnn = ncgru.NCGRU(task.input_size, 56, negatives=40, inverse=inverse, order=2, reset_every=50)
    head = torch.nn.Linear(56, task.output_size)
    torch.nn.init.normal_(head.weight, std=1 / (56 + task.output_size) ** 2)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-3)
    best, worst_error, window, start = float("inf"), 0.0, torch.zeros(()), time.perf_counter()
    for step in range(1, iterations + 1):
        inputs, targets = source.batch(step - 1)
        loss = task.loss(head(rnn(inputs)[0]), targets)
        optimizer.zero_grad()
        (loss + 0.5e-4 * head.weight.square().sum()).backward()
        optimizer.step()
        window += loss.detach()
        if step % MEASURE_EVERY == 0:
            error = float(ncgru.diagnostics.orthogonality_error(rnn)["weight_hh_l0.c"])
            worst_error = max(worst_error, error)
        if step % WINDOW == 0:
            mean = float(window) / WINDOW
            best = min(best, mean)
            window.zero_()
            if step % (10 * WINDOW) == 0:
                print(f"{step:6d}  loss {mean:.6f}  best {best:.6f}  ‖UᵀU-I‖ {error:.1e}", flush=True)
    return {
        "minimum": best,
        "final": mean,
        "orthogonality_error": worst_error,
        "seconds": round(time.perf_counter() - start, 1),
        "refreshes": int(ncgru.diagnostics.refreshes(rnn)["weight_hh_l0.c"]),
    }


def main() -> int:
    """Parse the command line, train, and compare with the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inverse", default="neumann", choices=["neumann", "hyperpower", "exact"])
    parser.add_argument("--bound", type=float, default=2e-3)
    arguments = parser.parse_args()
    result = train(arguments.iterations, arguments.seed, arguments.inverse)
    print(json.dumps({**vars(arguments), **result, "torch": torch.__version__, "ncgru": ncgru.__version__}))
    if result["minimum"] >= arguments.bound:
        print(f"the minimum {result['minimum']:.2e} is not below {arguments.bound:.2e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
