"""Writes `shardc/_answers.py`: dataclasses of what commands print, from `docs/schemas`. `python3 python/answers.py`."""

import json
import keyword
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCHEMAS = HERE.parent / "docs/schemas"
#: Commands that Python calls for an answer, and what their answers are called.
COMMANDS = {"audit": "Audit", "check": "Check", "diff": "Diff", "plan": "Planned", "price": "Price", "prove": "Proof",
            "verify": "Verified"}
WORDS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}

HEAD = '''"""What commands answer, as `docs/schemas` has it. Written by `python/answers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

'''


def camel(word):
    return "".join(part.capitalize() for part in word.replace("-", "_").split("_"))


class Module:
    def __init__(self):
        self.classes = []

    def type_of(self, schema, name):
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        null = "null" in kinds or None in schema.get("enum", [0])
        kinds = [k for k in kinds if k not in ("null", None)]
        if "enum" in schema and not kinds:
            own = "str" if all(isinstance(x, str) for x in schema["enum"] if x is not None) else "Any"
        elif len(kinds) != 1:
            words = sorted({WORDS.get(k, "Any") for k in kinds})
            own = f"Union[{', '.join(words)}]" if words and "Any" not in words else "Any"
        elif kinds == ["array"]:
            own = f"List[{self.type_of(schema.get('items') or {}, name)}]"
        elif kinds == ["object"]:
            own = self.object(schema, name)
        else:
            own = WORDS[kinds[0]]
        return f"Optional[{own}]" if null and own != "Any" else own

    def object(self, schema, name):
        if "properties" not in schema:
            more = schema.get("additionalProperties")
            return f"Dict[str, {self.type_of(more, name)}]" if isinstance(more, dict) else "Dict[str, Any]"
        required = schema.get("required", [])
        # What must be there stands first, as it has no default.
        names = sorted((n for n in schema["properties"] if n != "$schema"), key=lambda n: n not in required)
        lines = []
        for n in names:
            own = self.type_of(schema["properties"][n], name + camel(n))
            said = schema["properties"][n].get("description")
            if said:
                lines.append(f"    #: {said[0].upper()}{said[1:]}.")
            field = n.replace("-", "_") + ("_" if keyword.iskeyword(n) else "")
            if n in required:
                lines.append(f"    {field}: {own}")
            else:
                lines.append(f"    {field}: {own if own.startswith('Optional') or own == 'Any' else f'Optional[{own}]'} = None")
        self.classes.append("\n".join(["@dataclass(frozen=True)", f"class {name}:", *(lines or ["    pass"])]))
        return name


def text():
    module = Module()
    for command, name in COMMANDS.items():
        module.object(json.loads((SCHEMAS / f"{command}.json").read_text(encoding="utf-8")), name)
    names = ", ".join(f'"{name}"' for name in COMMANDS.values())
    return HEAD + "\n\n\n".join([f"__all__ = [{names}]", *module.classes]) + "\n"


if __name__ == "__main__":
    (HERE / "shardc/_answers.py").write_text(text(), encoding="utf-8")
