"""Compiles transformers to sharded programs. Everything is done by the command `shardc`, which comes with this package."""

from ._command import ShardcError, ShardcWarning, find_binary
from ._plan import Explanation, Parameter, Plan, compile

__all__ = ["Explanation", "Parameter", "Plan", "ShardcError", "ShardcWarning", "compile", "find_binary"]
