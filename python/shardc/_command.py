"""Runs the command `shardc`, and makes exceptions of its diagnostics."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from typing import Any, Dict, Iterator, List, Optional, Sequence


class ShardcWarning(UserWarning):
    """What the command warns of."""


class ShardcError(Exception):
    """A diagnostic of the command: what is wrong, where, by which rule, and ways out."""

    def __init__(self, diagnostic: Dict[str, Any]) -> None:
        super().__init__(diagnostic.get("rendered", diagnostic["message"]))
        self._diagnostic = dict(diagnostic)
        #: A word, as in `shardc explain PLAN rule:CODE`; None for what is not a diagnostic, as a bug.
        self.code: Optional[str] = diagnostic.get("code")
        self.message: str = diagnostic["message"]
        #: File, flag or line that it is about.
        self.place: Optional[str] = diagnostic.get("place")
        self.rule: Optional[str] = diagnostic.get("rule")
        #: How it came to this, nearest cause first.
        self.why: List[str] = diagnostic.get("why", [])
        #: Ways out.
        self.help: List[str] = diagnostic.get("help", [])
        #: Exit status of the command.
        self.exit_status: Optional[int] = diagnostic.get("exit")

    def __reduce__(self) -> Any:
        return type(self), (self._diagnostic,)


def find_binary() -> str:
    """The command: `SHARDC_BINARY` if it is set, else that of this package, else the first on the path."""
    named = os.environ.get("SHARDC_BINARY")
    if named:
        return named
    name = "shardc" + (sysconfig.get_config_var("EXE") or "")
    user = sysconfig.get_preferred_scheme("user") if sys.version_info >= (3, 10) else os.name + "_user"
    for folder in (sysconfig.get_path("scripts"), sysconfig.get_path("scripts", scheme=user)):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError("the command shardc is not installed; install the wheel, or set SHARDC_BINARY")
    return found


def run(args: Sequence[str], no: int = 0) -> str:
    """Runs the command with JSON on both streams; what it prints. With the status `no` its answer is no, and not an error.

    Warnings become Python's; an error raises ShardcError.
    """
    words = [find_binary(), *args]
    # What stands behind `--` is not the command's own.
    at = words.index("--") if "--" in words else len(words)
    words[at:at] = ["--format", "json"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace")
    told(args[0], done.stderr, 0 if done.returncode == no else done.returncode)
    return done.stdout


def lines(args: Sequence[str]) -> Iterator[Dict[str, Any]]:
    """Runs the command, and yields the objects that it prints as they come.

    Whoever stops listening ends it: a run that saves does so first.
    """
    words = [find_binary(), *args, "--format", "json"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        out = subprocess.PIPE
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=said, encoding="utf-8", errors="replace")
        assert process.stdout is not None
        ended = False
        try:
            for line in process.stdout:
                yield json.loads(line)
            ended = True
        finally:
            if not ended:
                process.terminate()
            process.stdout.close()
            status = process.wait()
        said.seek(0)
        told(args[0], said.read(), status)


def _outside() -> int:
    """The stack level of whoever called this package: a warning is about their line."""
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def told(command: str, stderr: str, status: int) -> None:
    """Warns of what a command warned of, and raises its error."""
    failed: Optional[Dict[str, Any]] = None
    unread: List[str] = []
    for line in stderr.splitlines():
        try:
            said = json.loads(line)
            level = said["level"]
        except (ValueError, TypeError, KeyError):
            unread.append(line)
            continue
        if level == "warning":
            warnings.warn(said["rendered"], ShardcWarning, stacklevel=_outside())
        elif level == "error":
            failed = said
    if status != 0:
        told = "\n".join(unread) or f"shardc {command} ended with status {status}"
        raise ShardcError({"exit": status, **(failed or {"message": told})})
