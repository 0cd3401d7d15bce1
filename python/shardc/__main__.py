"""`python -m shardc`: the command."""

import subprocess
import sys

from ._command import find_binary

if __name__ == "__main__":
    sys.exit(subprocess.run([find_binary(), *sys.argv[1:]]).returncode)
