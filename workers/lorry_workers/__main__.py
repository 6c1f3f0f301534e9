"""`python -m lorry_workers`: the same as `lorry worker`."""

import typer

from .cli import worker

if __name__ == "__main__":
    typer.run(worker)
