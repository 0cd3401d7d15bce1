"""A rank of `shardc run --engine torch`: it does what that command tells it, over a connection.

`python -m shardc.torch.serve FOLDER` is started by the command, through torchrun; messages are as in its source.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch.distributed as dist
from torch import Tensor

from .._command import ShardcError
from ._link import Asked, Gone, Link, numbers
from ._mesh import this_rank
from ._step import Step, load

#: Asks Linux for a signal when the parent ends.
_PARENT_ENDS = 1


def _columns(head: Mapping[str, Any], data: bytearray) -> Dict[str, Tensor]:
    out, at = {}, 0
    for name, dtype, n in head["columns"]:
        out[name] = numbers(data[at : at + 4 * n], dtype)
        at += 4 * n
    return out


def answer(step: Step, link: Link) -> None:
    """Does what it is told, until there is nobody who tells it."""
    while True:
        head, data = link.receive()
        if "piece" in head:
            step.show(link, head)
            continue
        shown = step.told(head, _columns(head, data))
        link.send({"shown": [[kind, name, m, x.numel()] for kind, name, m, x in shown]}, [x for *_, x in shown])


def _began_here(error: BaseException) -> bool:
    """Whether an error is not what another rank's end has led to."""
    text = str(error).lower()
    return not (isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text or "connection" in text)


def _failure(error: BaseException) -> Dict[str, Any]:
    own = isinstance(error, ShardcError)
    first = error.message if isinstance(error, ShardcError) else f"{type(error).__name__}: {error}".splitlines()[0]
    help: List[str] = error.help if isinstance(error, ShardcError) else []
    return {"own": own or _began_here(error), "message": first, "help": help}


def main() -> None:
    p = argparse.ArgumentParser(description="A rank of `shardc run --engine torch`, which starts it.")
    p.add_argument("folder")
    p.add_argument("--timeout", type=float)
    a = p.parse_args()
    address, secret = os.environ.get("SHARDC_ENGINE"), os.environ.get("SHARDC_ENGINE_SECRET")
    if address is None:
        sys.exit("shardc run --engine torch starts this")
    try:
        ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGKILL)
    except (OSError, AttributeError):
        pass
    link: Optional[Link] = None
    try:
        host, port = address.rsplit(":", 1)
        plan = json.loads((Path(a.folder) / "program.json").read_text(encoding="utf-8"))["plan"]
        link = Link((host, int(port)), this_rank(), secret or "", plan)
        step = load(a.folder, Asked(link), a.timeout)
        link.send({"ready": True})
        answer(step, link)
    except (Gone, ConnectionError, BrokenPipeError):
        pass
    except BaseException as error:
        try:
            assert link is not None
            link.send({"failed": _failure(error)})
        except OSError:
            pass
        raise
    # Groups of ranks that have failed cannot be ended.
    os._exit(0)


if __name__ == "__main__":
    main()
