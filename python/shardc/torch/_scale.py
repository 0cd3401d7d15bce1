"""The scale of a loss, by the rules of the runtime: those of Megatron-LM's grad scalers."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from ._data import wrong

_LARGEST = 2.0**126


class LossScale:
    """What the loss of a step is multiplied by, and how many steps have overflowed and changed nothing."""

    def __init__(self, how: Optional[Mapping[str, Any]]) -> None:
        self.how = how
        self.skipped = 0
        self._good = 0
        self.scale = 1.0
        self._left = 0
        if how is not None:
            self.scale = float(how["scale"] if how["kind"] == "constant" else how["initial"])
            self._left = how.get("hysteresis", 0)

    def update(self, finite: bool) -> None:
        """Takes note of a step, and whether its gradients were finite."""
        assert self.how is not None
        self.skipped += not finite
        if self.how["kind"] == "constant":
            if not finite:
                raise wrong(
                    f"gradients are not finite at the scale {self.scale} of the loss",
                    "recompile without --loss-scale, or with a lower one", "nan-loss",
                )
            return
        if finite:
            self._good += 1
            if self._good >= self.how["window"]:
                self._good, self._left = 0, self.how["hysteresis"]
                self.scale = min(self.scale * 2, _LARGEST)
            return
        self._good = 0
        self._left -= 1
        if self._left > 0:
            return
        if self.scale <= self.how["min"]:
            raise wrong(
                f"gradients are not finite at the smallest scale of the loss, {self.scale}",
                "recompile with --dtype bf16, with a lower --lr, or with --clip 1.0", "nan-loss",
            )
        self.scale = max(self.scale / 2, self.how["min"])

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint has of it."""
        changes = self.how is not None and self.how["kind"] != "constant"
        own = {"scale": self.scale, "good": self._good, "left": self._left} if changes else None
        return {"skipped": self.skipped, "loss_scale": own}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint has."""
        self.skipped = saved["skipped"]
        own = saved["loss_scale"]
        if own is not None and self.how is not None and self.how["kind"] != "constant":
            self.scale, self._good, self._left = float(own["scale"]), own["good"], own["left"]
