"""`python -m lorry` is `lorry`, also where the console script is not on the PATH."""

from lorry.cli import main

if __name__ == "__main__":
    main()
