"""Writes the table of config classes that tests read exported files with: python fields.py FOLDER > FILE

FOLDER has a folder for each package, called by name and version or commit (`torchtitan 0.3.0`), as its wheel or source
is unpacked. Of each class: its fields, with their types as they are written. Nothing is imported.
"""

import ast
import json
import pathlib
import sys

# Of each package the classes that exports fill; a class has the fields of its bases, too.
CLASSES = {
    "torchtitan": ["ParallelismConfig", "TrainingConfig", "CompileConfig"],
    "deepspeed": ["DeepSpeedZeroConfig", "DeepSpeedFP16Config", "DeepSpeedBF16Config"],
    "megatron-core": ["MLATransformerConfig", "DistributedDataParallelConfig"],
}


def classes(folder):
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield from (n for n in tree.body if isinstance(n, ast.ClassDef))


def fields(node):
    own = (n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    return {named(n): " ".join(ast.unparse(n.annotation).split()) for n in own}


def named(n):
    """The name that a file has: another one than the field's where pydantic is told so."""
    words = n.value.keywords if isinstance(n.value, ast.Call) else []
    alias = [w.value.value for w in words if w.arg == "alias" and isinstance(w.value, ast.Constant)]
    return alias[0] if alias else n.target.id


table = {}
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    wanted = CLASSES[folder.name.split()[0]]
    nodes = {}
    for node in classes(folder):
        nodes.setdefault(node.name, node)

    def all_of(name):
        bases = [b.id for b in nodes[name].bases if isinstance(b, ast.Name) and b.id in nodes]
        return {k: v for b in bases for k, v in all_of(b).items()} | fields(nodes[name])

    table[folder.name] = {name: all_of(name) for name in wanted if name in nodes}
print(json.dumps(table, indent=1, sort_keys=True))
