"""The mesh of ranks, groups of them, and what of a tensor each of them has."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

#: Where this rank computes.
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")

#: A part of an axis: its name, how many positions are major to it, and its size.
Atom = Tuple[str, int, int]


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def free_memory() -> Optional[int]:
    """Bytes that this rank may take: of its device, or its share of the machine's; None where nobody says it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Mesh:
    """Named axes, outer to inner: the rank is the number whose digits are the places along them."""

    def __init__(self, axes: Sequence[Tuple[str, int]]) -> None:
        self.axes = list(axes)
        self.sizes = dict(axes)
        self.ranks = math.prod(size for _, size in axes)
        self.rank = this_rank() % self.ranks
        self._over: Dict[Tuple[Atom, ...], Over] = {}
        self._sets: Dict[FrozenSet[Atom], Any] = {}

    def coordinates(self, rank: int) -> Dict[str, int]:
        """The place of a rank along each axis."""
        at = {}
        for name, size in reversed(self.axes):
            rank, at[name] = divmod(rank, size)
        return at

    def number(self, at: Dict[str, int]) -> int:
        """The rank at these places."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + at[name]
        return rank

    def over(self, *atoms: Union[str, Atom]) -> Over:
        """The ranks that differ from this one along these axes alone, or parts of axes, outer to inner."""
        own = tuple((a, 1, self.sizes[a]) if isinstance(a, str) else tuple(a) for a in atoms)
        if own not in self._over:
            self._over[own] = Over(self, own)
        return self._over[own]

    def group(self, *atoms: Union[str, Atom]) -> Over:
        """The same, of ranks that exchange data."""
        over = self.over(*atoms)
        self._sets.setdefault(frozenset(over.atoms), None)
        return over

    def connect(self) -> None:
        """Makes the process groups, in one order on all ranks."""
        for atoms in self._sets:
            self._sets[atoms] = self.new_group(Over(self, tuple(atoms)))

    def new_group(self, over: Over) -> Any:
        """A process group of its own for these ranks; to be called on all ranks."""
        own = None
        for ranks in sorted({tuple(sorted(over.members(r))) for r in range(self.ranks)}):
            made = dist.new_group(list(ranks))
            own = made if self.rank in ranks else own
        return own

    def disconnect(self) -> None:
        """Ends the process groups."""
        for atoms, group in self._sets.items():
            if group is not None:
                dist.destroy_process_group(group)
            self._sets[atoms] = None

    def process_group(self, atoms: Tuple[Atom, ...]) -> Any:
        return self._sets[frozenset(atoms)]


class Over:
    """Ranks along some axes. Places are numbered with the first axis outermost."""

    def __init__(self, mesh: Mesh, atoms: Tuple[Atom, ...], is_turned: bool = False) -> None:
        self.mesh = mesh
        self.atoms = atoms
        self.is_turned = is_turned
        self.ways = math.prod(size for _, _, size in atoms)
        #: The ranks of this group, by place.
        self.ranks = self.members(mesh.rank)
        #: The place of this rank.
        self.place = self.place_of(mesh.rank)
        by_number = sorted(self.ranks)
        #: For each place the rank's number within the process group.
        self.order = [by_number.index(r) for r in self.ranks]

    def _distance(self, atom: Atom) -> int:
        axis, before, size = atom
        return self.mesh.sizes[axis] // (before * size)

    def members(self, rank: int) -> List[int]:
        """The ranks of the group of a rank, by place."""
        own, out = self.mesh.coordinates(rank), []
        for places in itertools.product(*(range(size) for _, _, size in self.atoms)):
            at = dict(own)
            for atom, place in zip(self.atoms, places):
                axis, step = atom[0], self._distance(atom)
                at[axis] += (place - at[axis] // step % atom[2]) * step
            out.append(self.mesh.number(at))
        return out[::-1] if self.is_turned else out

    def turned(self) -> Over:
        """The same ranks, the last first."""
        return Over(self.mesh, self.atoms, not self.is_turned)

    def place_of(self, rank: int) -> int:
        """The place of a rank in its group."""
        at, place = self.mesh.coordinates(rank), 0
        for atom in self.atoms:
            place = place * atom[2] + at[atom[0]] // self._distance(atom) % atom[2]
        return self.ways - 1 - place if self.is_turned else place

    @property
    def group(self) -> Any:
        return self.mesh.process_group(self.atoms)

    def extent(self, size: int, rank: Optional[int] = None) -> Tuple[int, int]:
        """Where a rank's piece of a dim begins, and its length: pieces are of ceil(size / ways), the last may be short."""
        piece = -(-size // self.ways)
        start = min((self.place if rank is None else self.place_of(rank)) * piece, size)
        return start, min(piece, size - start)

    def start(self, size: int) -> int:
        """Where this rank's piece of a dim begins."""
        return self.extent(size)[0]

    def length(self, size: int) -> int:
        """How much this rank has of a dim."""
        return self.extent(size)[1]

    def before(self, shift: int) -> int:
        """The place of the rank that is so many before this one in the ring."""
        return (self.place - shift) % self.ways


#: A dim: its size, and what splits it.
Dim = Union[int, Tuple[int, Over]]
#: A range of each dim.
Box = Tuple[Tuple[int, int], ...]


def extents(dims: Sequence[Dim], rank: int) -> Box:
    """What a rank has of each dim: where it begins, and its length."""
    return tuple((0, d) if isinstance(d, int) else d[1].extent(d[0], rank) for d in dims)


class Exchange:
    """How ranks go from one layout of a tensor to another: the boxes that this one gives and takes.

    With `sums` the result is a sum over these axes, of which each element is with one rank. With `shift`, index i of
    that dim of the result is index i + start of the operand.
    """

    def __init__(
        self, over: Over, operand: Sequence[Dim], result: Sequence[Dim], sums: Optional[Over] = None,
        shift: Optional[Tuple[int, int]] = None,
    ) -> None:
        mesh = over.mesh
        ranks = sorted(over.ranks)
        have = {r: extents(operand, r) for r in ranks}
        want = {r: extents(result, r) for r in ranks}
        if shift is not None:
            dim, by = shift
            want = {r: tuple((s + by if d == dim else s, n) for d, (s, n) in enumerate(b)) for r, b in want.items()}
        self.over = over
        self.shape = [n for _, n in want[mesh.rank]]
        # Who gives a box is named by who takes it; of a sum it is the other way round.
        named, other = (want, have) if sums is not None else (have, want)
        pairs = []
        for one in over.ranks:
            holders: Dict[Box, List[int]] = {}
            for r in over.ranks:
                holders.setdefault(named[r], []).append(r)
            for box, all_of in holders.items():
                common = _meet(box, other[one])
                if common is None:
                    continue
                two = one if one in all_of else all_of[over.ranks.index(one) % len(all_of)]
                pairs.append((one, two, common) if sums is not None else (two, one, common))
        me = mesh.rank
        self.give = [[_cut(c, have[me]) for g, t, c in pairs if g == me and t == r] for r in ranks]
        self.take = [[_cut(c, want[me]) for g, t, c in pairs if t == me and g == r] for r in ranks]


def _meet(a: Box, b: Box) -> Optional[Box]:
    out = []
    for (s, n), (t, m) in zip(a, b):
        low, high = max(s, t), min(s + n, t + m)
        if low >= high:
            return None
        out.append((low, high))
    return tuple(out)


def _cut(box: Box, within: Box) -> Tuple[slice, ...]:
    return tuple(slice(low - s, high - s) for (low, high), (s, _) in zip(box, within))
