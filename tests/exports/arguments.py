"""Writes the table of Megatron-LM's arguments that tests read exported flags with: python arguments.py SOURCE COMMIT > FILE

Of each flag: how many values it takes (0, 1, "+"), of which type, and which are allowed.
"""

import argparse
import json
import sys
import typing
import warnings

warnings.simplefilter("ignore")
typing.override = getattr(typing, "override", lambda f: f)
sys.path.insert(0, sys.argv[1])
from megatron.training.arguments import add_megatron_arguments

parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
table = {}
for action in parser._actions:
    takes = {0: 0, None: 1, 1: 1}.get(action.nargs, "+")
    kind = {int: "int", float: "float"}.get(action.type, "text")
    row = {"takes": takes}
    if takes != 0:
        row["type"] = kind
    if action.choices is not None:
        row["choices"] = [str(c) for c in action.choices]
    for flag in action.option_strings:
        if flag.startswith("--"):
            table[flag] = row
lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items()))
print("{\n  \"commit\": %s,\n%s\n}" % (json.dumps(sys.argv[2]), lines))
