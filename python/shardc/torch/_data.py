"""A batch as the inputs of functions."""

from __future__ import annotations

import zlib
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._command import ShardcError
from ._mesh import Mesh, device

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}
#: How columns are filled that batches have.
_GIVEN = ("tokens", "labels", "mask", "column")
#: Labels below 0 are ignored.
IGNORED = -100


class Layout:
    """A type of the plan: the element type, and of each dim its size and what splits it."""

    def __init__(self, mesh: Mesh, of: Any) -> None:
        self.dtype = DTYPES[of[0]]
        self.sizes = [size for size, _ in of[1]]
        self.over = [mesh.over(*(tuple(a) for a in atoms)) for _, atoms in of[1]]

    def extents(self, rank: Optional[int] = None) -> List[Tuple[int, int]]:
        """Of each dim, where a rank's piece begins and its length."""
        return [o.extent(size, rank) for size, o in zip(self.sizes, self.over)]

    @property
    def shape(self) -> List[int]:
        return [n for _, n in self.extents()]


def wrong(message: str, help: str, code: str = "batch-shape") -> ShardcError:
    rendered = f"error[{code}]: {message}\n  help: {help}"
    return ShardcError({"code": code, "message": message, "help": [help], "rendered": rendered, "exit": 2})


class Inputs:
    """Fills the inputs of functions from a batch, whose columns have all rows of the batch or those of this rank."""

    def __init__(self, mesh: Mesh, settings: Mapping[str, Any], table: List[Dict[str, Any]]) -> None:
        self.mesh, self.settings = mesh, settings
        self.table = {row["name"]: row for row in table}
        seq, order = settings["seq"], settings["tokens"]
        self.order = torch.arange(seq)
        if order["kind"] == "zigzag":
            chunks = self.order.chunk(2 * order["ranks"])
            pairs = [torch.cat([chunks[r], chunks[-1 - r]]) for r in range(order["ranks"])]
            self.order = torch.cat(pairs)
        self._fixed: Dict[Any, Tensor] = {}
        self._columns: Dict[str, Tensor] = {}
        self._before: Optional[Tensor] = None
        # How many rows batches have, by what they are for; and this one.
        self._rows: Dict[str, int] = {}
        self._own = "step", 0

    def begin(self, batch: Mapping[str, Tensor], what: str = "step") -> None:
        """Takes the columns of a step, or of an evaluation."""
        self._columns, self._before = {}, None
        for name, x in batch.items():
            if not isinstance(x, Tensor):
                raise wrong(f"{name!r} is a {type(x).__name__}, and not a tensor", "collate rows into tensors, or take it out")
        read = {row["name"] for row in self.table.values() if row["fill"] == "segments"}
        for row in self.table.values():
            if row["fill"] in _GIVEN:
                source, x = self._column(row, batch)
                read.add(source)
                x = self._checked(row, x)
                self._columns[row["name"]] = x
                # Half of a batch may be all that a rank has of one: not where it has had all.
                if not row["batch"]:
                    continue
                self._own = what, len(x)
                before = self._rows.get(*self._own)
                if len(x) != before:
                    way = "leave out what is left of the data: DataLoader(…, drop_last=True); or pad it with rows whose labels are -100"
                    raise wrong(f"{row['name']!r} has {len(x)} rows, and {before} in batches before", way)
        for name in batch:
            if name not in read:
                self._unread(name, batch[name])
        if self.settings.get("documents"):
            self._documents(self.settings["documents"], batch)
        self._ahead()
        self._scored()

    def agree(self, shares: Mapping[str, int]) -> None:
        """Refuses the first batch of its kind if ranks have other rows where they need the same; to be called on all ranks.

        `shares` says by column which share of a batch this rank needs.
        """
        if self._own[0] in self._rows or self.mesh.ranks == 1:
            return
        own = {}
        for name, x in self._columns.items():
            row = self.table[name]
            if row["fill"] in _GIVEN and name in shares:
                is_share = row["batch"] and len(x) < self.settings["global_batch"]
                number = zlib.crc32(x.cpu().flatten().view(torch.uint8).numpy())
                own[name] = f"share {shares[name]} of the batch" if is_share else "the whole batch", number
        all_of: List[Any] = [None] * self.mesh.ranks
        dist.all_gather_object(all_of, own)
        known: Dict[Tuple[str, str], Tuple[int, int]] = {}
        for rank, has in enumerate(all_of):
            for name, (what, number) in has.items():
                other, same = known.setdefault((name, what), (rank, number))
                if number != same:
                    raise wrong(
                        f"ranks {other} and {rank} were given other rows, and both take them as {what}",
                        "give each rank the same batch (a DataLoader with a seeded generator, no DistributedSampler); or of each "
                        "data rank its own rows alone, the same on the ranks of tp, cp and pp beside it",
                    )

    def end(self) -> None:
        """A step or an evaluation has gone well."""
        self._rows.setdefault(*self._own)

    def take(self, columns: Mapping[str, Tensor]) -> None:
        """Takes the columns of a step of which nothing is left to be made: all rows, one number behind the other."""
        self._columns, self._before = {}, None
        for name, x in columns.items():
            row = self.table.get(name)
            if row is not None:
                self._columns[name] = x.reshape([-1, *row["sizes"]] if row["batch"] else row["sizes"])

    def _column(self, row: Mapping[str, Any], batch: Mapping[str, Tensor]) -> Tuple[str, Tensor]:
        """What fills an input, and the name of the column in the batch."""
        name, fill, reads = row["name"], row["fill"], row["reads"]
        if name in batch:
            return name, _behind(batch[name]) if fill == "labels" and reads == "next" else batch[name]
        tokens = batch.get("input_ids")
        if fill == "tokens" and reads == "" and tokens is not None:
            return "input_ids", tokens
        if fill == "labels" and reads == "" and "labels" in batch:
            return "labels", _behind(batch["labels"])
        if fill == "labels" and reads == "causal" and tokens is not None:
            return "input_ids", _behind(tokens)
        if fill == "mask":
            rows = next((len(x) for x in batch.values()), 0)
            return name, torch.ones(rows, *row["sizes"], dtype=torch.int32)
        has = ", ".join(sorted(batch)) or "nothing"
        way = f"give a tensor of the name {name!r}"
        if fill == "labels" and reads == "":
            way = "give 'labels', each at its own token: to train on all tokens, a copy of input_ids"
        raise wrong(f"the batch has no {name!r}: it has {has}", way)

    def _unread(self, name: str, x: Tensor) -> None:
        """Refuses a column that no input takes, unless that changes nothing."""
        if name == "attention_mask" and bool((x != 0).all()):
            return
        if name == "labels" and all(row["fill"] != "labels" for row in self.table.values()):
            return
        takes = ", ".join(repr(row["name"]) for row in self.table.values() if row["fill"] in (*_GIVEN, "segments"))
        way = "take it out of the batch, if the loss does not depend on it"
        if name == "attention_mask":
            way = (
                "pad on the right, with labels of -100, and take it out: no token before sees padding then; or compile with "
                "documents=\"rows\", and give 'segments', below 0 where padding is"
            )
        if name == "position_ids":
            way = "compile with documents=\"rows\", and give 'segments': for each token the number of its document"
        raise wrong(f"the plan takes no column {name!r}, and what is left out would change numbers: it takes {takes}", way)

    def _checked(self, row: Mapping[str, Any], x: Tensor) -> Tensor:
        name, want = row["name"], list(row["sizes"])
        whole = self.settings["global_batch"]
        rows, sizes = (x.shape[0] if x.dim() else 0, list(x.shape[1:])) if row["batch"] else (0, list(x.shape))
        if sizes != want or (row["batch"] and rows != whole and whole % max(rows, 1)):
            shape = [whole, *want] if row["batch"] else want
            raise wrong(
                f"{name!r} has the shape {list(x.shape)}, the plan needs {shape}",
                f"give {shape}, or of a rank its own rows alone; or compile with another --global-batch or --seq",
            )
        dtype = DTYPES[row["dtype"]]
        if x.dtype.is_floating_point != dtype.is_floating_point:
            raise wrong(f"{name!r} is of {x.dtype}, the plan needs {dtype}", f"give {dtype}")
        below = row["below"]
        if below is not None and not x.dtype.is_floating_point and x.device.type == "cpu" and x.numel():
            least, most = int(x.min()), int(x.max())
            low = 0 if row["fill"] != "labels" else least
            if most >= below or least < low:
                bad = most if most >= below else least
                raise wrong(f"{name!r} has {bad}; the plan knows {below}", f"use 0 to {below - 1}", "token-range")
        return x.to(dtype)

    def _documents(self, how: Any, batch: Mapping[str, Tensor]) -> None:
        """Which token is of which document, and which labels are scored: tokens part documents, or the batch says it."""
        named = {row["fill"]: name for name, row in self.table.items()}
        tokens = self._columns.get(named.get("tokens", ""))
        if tokens is None:
            return
        if how == "rows":
            # Neighbours of one document have the same number, padding one below 0; without them a row is one document.
            name = named.get("segments", "")
            given = self._checked(self.table[name], batch[name]) if name in batch else torch.zeros_like(tokens)
            numbers = given.clamp(min=-1)
            pads, begins = numbers < 0, numbers != numbers.roll(1, 1)
            scored = ~pads
            scored[:, :-1] &= ~begins[:, 1:]
        else:
            end, padding = how["end"], how.get("padding")
            scored = tokens != end
            beside = torch.cat([tokens[:, 1:2], tokens[:, :-1]], 1) if tokens.shape[1] > 1 else torch.full_like(tokens, end - 1)
            pads = torch.zeros_like(tokens, dtype=torch.bool)
            if padding is not None:
                pads = (tokens == padding) & ((tokens != end) | (beside == end))
            before, padded = tokens.roll(1, 1), pads.roll(1, 1)
            begins = (padded != pads) | ((before == end) & ~padded)
        labels = self._columns.get(named.get("labels", ""))
        if labels is not None and labels.shape == tokens.shape:
            if how != "rows" and padding is not None and padding != end:
                scored &= (tokens != padding) & (labels != padding)
            self._columns[named["labels"]] = torch.where(scored, labels, IGNORED)
        begins[:, 0] = True
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        first = torch.where(begins, places, 0).cummax(1).values
        segments = torch.where(pads, -1, (begins & ~pads).cumsum(1) - 1)
        made = {"segments": segments, "offsets": places - first}
        self._before = torch.where(pads, -1, made["offsets"])
        if "count" in named:
            if tokens.shape[0] != self.settings["global_batch"]:
                raise wrong("tokens that are not padding are counted over the batch", "give all of its rows")
            count = max(int((segments != -1).sum()), 1) / self.settings["microbatches"]
            made["count"] = torch.tensor(count, dtype=torch.float32)
        for fill, x in made.items():
            if fill in named:
                self._columns[named[fill]] = x

    def _scored(self) -> None:
        """How many labels are scored that have 1, 2, … tokens before them, and are of each class, of a microbatch in the mean."""
        named = {row["fill"]: name for name, row in self.table.items()}
        if "labels" not in named or not {"scored", "histogram"} & named.keys():
            return
        labels = self._columns[named["labels"]]
        if labels.shape[0] != self.settings["global_batch"]:
            raise wrong("labels that are scored are counted over the batch", "give all of its rows")
        for name, row in self.table.items():
            if row["fill"] == "histogram":
                counts = torch.bincount(labels[labels >= 0].flatten(), minlength=row["sizes"][0])
                self._columns[name] = counts.float() / self.settings["microbatches"]
        if "scored" in named:
            ahead = self._columns[named["labels_ahead"]]
            counts = (ahead >= 0).sum((0, 1)).clamp(min=1)
            self._columns[named["scored"]] = counts.float() / self.settings["microbatches"]

    def _ahead(self) -> None:
        """Tokens and labels further on, as many of whose document stand before them; -1 where there are none."""
        named = {row["fill"]: name for name, row in self.table.items()}
        for fill, source in [("ahead", "tokens"), ("labels_ahead", "labels")]:
            if fill not in named or named.get(source) not in self._columns:
                continue
            x = self._columns[named[source]]
            before = self._before
            if before is None:
                before = torch.arange(x.shape[1], device=x.device).expand_as(x)
            out = x.new_full([*x.shape, self.table[named[fill]]["sizes"][-1]], -1)
            for d in range(1, out.shape[2] + 1):
                out[:, :-d, d - 1] = torch.where(before[:, d:] >= d, x[:, d:], -1)
            self._columns[named[fill]] = out

    def get(self, name: str, layout: Layout, key: Any, microbatch: Optional[int], step: int) -> Tensor:
        """This rank's piece of an input; `key` tells its type from others."""
        row = self.table[name]
        fill, settings = row["fill"], self.settings
        if fill == "run":
            seed = settings["seed"]
            words = torch.tensor([seed & 0xFFFFFFFF, seed >> 32, step], dtype=torch.int64)
            return words.to(torch.int32).to(device)
        extents = layout.extents()
        if fill == "positions":
            if (name, key) not in self._fixed:
                x = self.order.expand(layout.sizes)
                x = x[tuple(slice(s, s + n) for s, n in extents)]
                self._fixed[name, key] = x.to(layout.dtype).contiguous().to(device)
            return self._fixed[name, key]
        if fill == "places":
            x = torch.arange(settings["global_batch"])[:, None] * settings["seq"] + torch.arange(settings["seq"])
        else:
            x = self._columns[name]
        cut = []
        for d, (start, n) in enumerate(extents):
            if d == 0 and row["batch"]:
                # A rank's rows of all its microbatches lie together.
                pieces = layout.over[0].ways
                each = layout.sizes[0] // pieces
                whole = settings["global_batch"]
                if x.shape[0] not in (whole, whole // pieces):
                    own = whole // pieces
                    raise wrong(f"{name!r} has {x.shape[0]} rows", f"give all {whole} rows, or the {own} of this rank")
                own = layout.over[0].place * (whole // pieces) if x.shape[0] == whole else 0
                start = own + (microbatch or 0) * each
            if d == row["seq"]:
                x = x.index_select(d, self.order.to(x.device))
            cut.append(slice(start, start + n))
        return x[tuple(cut)].to(layout.dtype).contiguous().to(device)


def _behind(labels: Tensor) -> Tensor:
    """Labels that stand at their own tokens, as those of the tokens before them."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
