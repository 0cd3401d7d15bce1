"""`python -m shardc.torch FOLDER …`: the program of an export, as `FOLDER/program.py …` itself."""

import sys
from pathlib import Path

from ._step import main

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m shardc.torch FOLDER --weights MODEL --batch FILE.safetensors")
    folder = sys.argv.pop(1)
    main(Path(folder) / "program.py")
