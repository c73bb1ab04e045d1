"""The command `ncgru`, also as `python -m ncgru.lab` (for `torchrun -m ncgru.lab`)."""

import sys


def main() -> None:
    """Run the command, or say what to install where the laboratory's libraries are missing."""
    try:
        from ncgru.lab import cli
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ncgru"):
            raise
        sys.exit(f'ncgru: the laboratory needs {error.name}, which is not installed; pip install "ncgru[lab]"')
    cli.main()


if __name__ == "__main__":
    main()
