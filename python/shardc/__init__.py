"""Compiles transformers to sharded programs. Everything is done by the command `shardc`, which comes with this package."""

from ._ask import audit, check, diff, export, plan, price, prove, report, verify
from ._command import ShardcError, ShardcWarning, find_binary
from ._plan import Explanation, Parameter, Plan, compile

# fmt: off
__all__ = [
    "Explanation", "Parameter", "Plan", "ShardcError", "ShardcWarning", "audit", "check", "compile", "diff", "export",
    "find_binary", "plan", "price", "prove", "report", "verify",
]
