"""The connection of a rank to the command: messages of a head, which is JSON, and numbers behind it, as in its source."""

from __future__ import annotations

import json
import socket
from typing import Any, Dict, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ._store import Values

_DTYPES = {"f32": torch.float32, "i32": torch.int32}


class Gone(Exception):
    """The command has ended, or does not listen any more."""


class Link:
    """The connection of a rank, over which the command asks."""

    def __init__(self, address: Tuple[str, int], rank: int, secret: str, plan: str) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self.send({"rank": rank, "secret": secret, "plan": plan})

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def send(self, head: Mapping[str, Any], data: Sequence[Tensor] = ()) -> None:
        text = json.dumps(head).encode()
        parts = [x.detach().to(device="cpu", dtype=torch.float32).contiguous().reshape(-1) for x in data]
        size = sum(4 * x.numel() for x in parts)
        self._socket.sendall(len(text).to_bytes(4, "little") + size.to_bytes(8, "little") + text)
        for x in parts:
            self._socket.sendall(memoryview(x.numpy()).cast("B") if x.numel() else b"")

    def receive(self) -> Tuple[Dict[str, Any], bytearray]:
        sizes = self._read(12)
        head = self._read(int.from_bytes(sizes[:4], "little"))
        return json.loads(head.decode()), self._read(int.from_bytes(sizes[4:], "little"))

    def _read(self, n: int) -> bytearray:
        out = bytearray(n)
        rest = memoryview(out)
        while rest:
            got = self._file.readinto(rest)
            if not got:
                raise Gone
            rest = rest[got:]
        return out


class Asked(Values):
    """What the command gives a rank to begin with, or to go on from."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def first(self, kind: str, name: str, weight: Mapping[str, Any], init: Any, extents: Sequence[Tuple[int, int]]) -> Tensor:
        self._link.send({"want": [kind, name]})
        _, data = self._link.receive()
        return numbers(data, "f32").reshape([n for _, n in extents])


def numbers(data: bytearray, dtype: str) -> Tensor:
    return torch.frombuffer(data, dtype=_DTYPES[dtype]) if data else torch.empty(0, dtype=_DTYPES[dtype])
