"""Checkpoints of a step: the command writes and reads them, each rank gives and takes its pieces."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Sequence

import torch.distributed as dist

from .._command import ShardcError, find_binary, told
from ._link import Gone, Link
from ._mesh import this_rank, world_size

if TYPE_CHECKING:
    from ._step import Step


def shared(value: Any) -> Any:
    """What rank 0 has, on all ranks."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def ask(step: Step, plan: str, args: Sequence[str], each: Callable[[Link], None]) -> Dict[str, Any]:
    """Runs `shardc ranks` on rank 0, and does with every rank's connection what `each` says; what the command says."""
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) == world_size()
    words = [find_binary(), "ranks", plan, "--of", step.plan, *args, *([] if alone else ["--everywhere"]), "--format", "json"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process, unstarted = None, None
        call: List[Any] = [None, None]
        if this_rank() == 0:
            secret = secrets.token_hex(32)
            # What goes wrong here all ranks are told, which wait for it.
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, encoding="utf-8",
                    env={**os.environ, "SHARDC_ENGINE_SECRET": secret},
                )
                assert process.stdout is not None
                line = process.stdout.readline()
                call = [json.loads(line)["port"] if line else None, secret]
            except (OSError, ValueError, KeyError) as error:
                unstarted = error
        port, secret = shared(call)
        if port is not None:
            host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
            link = Link((host, port), this_rank(), secret, step.plan)
            try:
                each(link)
                while True:
                    step.show(link, link.receive()[0])
            except (Gone, ConnectionError):
                pass
            finally:
                link.close()
        outcome: List[Any] = [{}, unstarted]
        if process is not None:
            assert process.stdout is not None
            rest = process.stdout.read()
            status = process.wait()
            said.seek(0)
            try:
                told("ranks", said.read(), status)
                outcome[0] = json.loads(rest)
            except (ShardcError, ValueError) as error:
                outcome[1] = outcome[1] or error
        answer, failed = shared(outcome)
        if failed is not None:
            raise failed
        return dict(answer)
