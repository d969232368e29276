"""Which part of the package may import which, and that names are given once; read from the source.

Imports inside functions count. Those under `if TYPE_CHECKING` count for circles, not for layers.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "distir"
LAYERS = [
    {"ir"},
    {"ops"},
    {"importer", "transforms", "executor", "hardware"},
    {"models", "runtime", "viz", "export"},
    {"backends"},
    {"api"},
    {"search"},
    {"cli"},
    {"__main__"},
]
"""From the lowest. Each part may import itself and what is in layers below."""
ROOMS = {
    "transforms": [
        {"append", "relocate", "roles", "steady_state"},
        {"rewriting"},
        {"rank"},
        {"differentiation", "pipeline"},
        {"plan"},
        {"sharding"},
        {"passes"},
        {"parallel3d"},
    ],
    "executor": [{"cost_model", "reference"}, {"simulator"}],
    "backends": [{"tensors"}, {"transport"}, {"lowering"}, {"storage", "modules"}, {"processes"}],
}
"""The rooms (folders, or files) within a part, from the lowest; the part's own `__init__` is above them all."""
HOME = {
    "onnx": {"importer"},
    "onnx_ir": {"importer"},
    "onnxscript": {"backends"},
    "torch": {"backends"},
    "mpi4py": {"backends"},
    "matplotlib": {"viz"},
    "tokenizers": {"api"},
    "rich": {"cli"},
    "networkx": {"ir"},
    "prettyprinter": {"ir"},
}
"""Where alone a package is imported."""
PLACEMENTS = {"Placement", "Replicate", "Shard", "Partial"}
DISTINGUISHED = {
    "distir.ir.attributes": 1,  # that an attribute is a tuple of placements
    "distir.ir.result_types": 1,  # that the attribute `place` has splits
    "distir.ir.text": 3,  # the text of an attribute, by its kind
}
"""How often a file may ask for a placement's class: these ask it of attributes, which may be anything."""
HEAVY = {
    "numpy",
    "onnx",
    "torch",
    "networkx",
    "prettyprinter",
    "rich",
    "ml_dtypes",
    "matplotlib",
    "tokenizers",
    "mpi4py",
}


def layer(part):
    return next(k for k, parts in enumerate(LAYERS) if part in parts)


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path, typing=False):
    """(line, dotted name) of each import in a file, those of type checkers left out unless `typing`."""
    tree = ast.parse(path.read_text())
    for node in () if typing else ast.walk(tree):  # what stands under `if TYPE_CHECKING` is never imported
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module.split(".")[0] == "distir":  # the name may be a module's
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def room_layer(part, room):
    """The layer of a room in its part; above all others for the part itself."""
    rooms = ROOMS[part]
    if room is None:
        return len(rooms)
    found = [k for k, names in enumerate(rooms) if room in names]
    assert found, f"{part}/{room} has no layer: put it in ROOMS"
    return found[0]


def room_of(module):
    """(part, room) of a dotted name; the room is None for the part itself."""
    part, *rest = module.split(".")[1:] or ["distir"]
    return part, rest[0] if rest and part in ROOMS else None


def module_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def resolve(name, modules):
    """The module of a dotted name: itself, or what it is a name in."""
    return name if name in modules or "." not in name else resolve(name.rpartition(".")[0], modules)


def graph_of(paths):
    """Each module with the modules of the same package that it imports."""
    modules = {module_of(p): p for p in paths}
    found = [(m, resolve(name, modules)) for m, p in modules.items() for _, name in imported(p, typing=True)]
    return networkx.DiGraph([(a, b) for a, b in found if a != b and b in modules])


def bad_circles(graph):
    """Sets of files that import each other: in different rooms, or more than two."""
    circles = [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    return [c for c in circles if len(c) > 2 or len({m.rpartition(".")[0] for m in c}) > 1]


def given_twice(pairs):
    """Of (name, where) the names that stand in several places, with these."""
    places = defaultdict(list)
    for name, where in pairs:
        places[name].append(where)
    return {name: found for name, found in places.items() if len(found) > 1}


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_every_part_has_a_layer():
    assert {part_of(p) for p in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    here = part_of(path)
    for line, name in imported(path):
        top, *rest = name.split(".")
        if top == "distir" and rest:
            part = rest[0]
            if part in set().union(*LAYERS):
                assert part == here or layer(part) < layer(here), f"{path}:{line}: {here} may not import {part}"
        elif top in HOME:
            assert here in HOME[top], f"{path}:{line}: {top} is imported only in {', '.join(HOME[top])}"


@pytest.mark.parametrize("path", [p for p in FILES if part_of(p) in ROOMS], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_within_a_part_go_down(path):
    part, room = room_of(module_of(path))
    modules = set(map(module_of, FILES))
    for line, name in imported(path):
        to, other = room_of(resolve(name, modules))
        if to == part and other != room:
            assert room_layer(part, other) < room_layer(part, room), f"{path}:{line}: {room} may not import {name}"


def test_every_room_has_a_layer():
    for part, rooms in ROOMS.items():
        found = {room for p, room in map(room_of, map(module_of, FILES)) if p == part and room}
        assert found == set().union(*rooms)
        assert len(found) == sum(map(len, rooms)), "a room has one layer"


def test_no_circles():
    assert bad_circles(graph_of(FILES)) == []


def without(graph, direct):
    """The modules that are not in `direct`, and import none that is."""
    return [m for m in graph if m not in direct and not networkx.descendants(graph, m) & direct]


def test_what_loads_no_torch_is_not_in_backends():
    paths = [p for p in FILES if part_of(p) == "backends" and p.stem != "__init__"]
    graph = graph_of(paths)
    graph.add_nodes_from(map(module_of, paths))
    direct = {module_of(p) for p in paths if any(name.split(".")[0] == "torch" for _, name in imported(p))}
    assert without(graph, direct) == []


def test_what_loads_no_torch_is_seen():
    graph = networkx.DiGraph([("a", "b"), ("b", "c"), ("d", "e")])
    assert without(graph, {"c"}) == ["d", "e"]


def test_no_two_modules_of_one_name():
    """Packages are modules, too."""
    names = [module_of(p) for p in FILES if p.stem != "__main__"]
    assert given_twice((name.rpartition(".")[2], name) for name in names) == {}


def test_no_two_public_classes_of_one_name():
    classes = [
        (node.name, module_of(p))
        for p in FILES
        for node in ast.parse(p.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert given_twice(classes) == {}


def test_circles_are_seen():
    graph = networkx.DiGraph([("d.a.x", "d.a.y"), ("d.a.y", "d.a.x"), ("d.a.x", "d.b.z")])
    assert bad_circles(graph) == []
    graph.add_edge("d.b.z", "d.a.y")
    assert bad_circles(graph) == [{"d.a.x", "d.a.y", "d.b.z"}]
    two_rooms = networkx.DiGraph([("d.a.x", "d.b.z"), ("d.b.z", "d.a.x")])
    assert bad_circles(two_rooms) == [{"d.a.x", "d.b.z"}]
    three_files = networkx.DiGraph([("d.a.x", "d.a.y"), ("d.a.y", "d.a.z"), ("d.a.z", "d.a.x")])
    assert bad_circles(three_files) == [{"d.a.x", "d.a.y", "d.a.z"}]


def test_the_graph_has_all_kinds_of_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "distir")
    room = tmp_path / "distir" / "room"
    room.mkdir(parents=True)
    paths = [room / f"{name}.py" for name in "abcd"]
    for path in paths:
        path.write_text("")
    (room / "a.py").write_text("from distir.room.b import f\n")
    (room / "b.py").write_text("def f():\n    from distir.room import c\n")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    import distir.room.d\n")
    (room / "d.py").write_text("import distir.room.a\n")
    assert set(graph_of(paths).edges) == {(f"distir.room.{a}", f"distir.room.{b}") for a, b in ("ab", "bc", "cd", "da")}
    assert len(bad_circles(graph_of(paths))) == 1
    assert given_twice([("x", 1), ("y", 2), ("x", 3)]) == {"x": [1, 3]}


def test_a_wrong_import_is_seen(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def f():\n    from distir.api import run\n    import torch.nn\n")
    assert list(imported(file)) == [(2, "distir.api.run"), (3, "torch.nn")]
    assert layer("api") > layer("ir")


def asked(path):
    """The lines of a file that ask of which class a placement is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.MatchClass):
            names = [node.cls]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass"):
            names = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.Compare) and any(
            isinstance(x, ast.Call) and getattr(x.func, "id", None) == "type" for x in (node.left, *node.comparators)
        ):
            names = list(ast.walk(node))
        else:
            continue
        for x in names:
            if isinstance(x, ast.Name | ast.Attribute) and getattr(x, "id", getattr(x, "attr", "")) in PLACEMENTS:
                yield x.lineno


def test_no_case_distinctions_by_placement():
    """Code asks what it needs to know: a placement's `dim`, `kind`, `start` and so on."""
    found = {module_of(p): lines for p in FILES if (lines := list(asked(p)))}
    assert {name: len(lines) for name, lines in found.items()} == DISTINGUISHED, found


def test_a_question_for_a_class_is_seen(tmp_path):
    file = tmp_path / "wrong.py"
    lines = [
        "isinstance(p, Shard)",
        "isinstance(t.on(axis), (ir.Partial, Tensor))",
        "type(p) is Replicate",
        "isinstance(t, Tensor) and p.dim",
        "match p:\n    case Shard() | Partial(): pass",
    ]
    file.write_text("\n".join(lines))
    assert sorted(asked(file)) == [1, 2, 3, 6, 6]


def test_import_is_light():
    code = "import sys, distir, distir.cli, distir.executor; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(ast.literal_eval(done.stdout))


def test_a_prediction_imports_neither_other_models_nor_plans_of_other_tools():
    command = "simulate gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,batch=2 --cluster dgx-a100 --json"
    code = f"import sys, distir.cli; distir.cli.main({command.split()}); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = ast.literal_eval(done.stderr.splitlines()[-1])
    assert "distir.models.named" in loaded
    assert not [m for m in loaded if m.startswith(("distir.api.interop", "distir.models.sequences"))]


def cycle(graph):
    """The nodes of a circle in a graph, if there is one."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return path[path.index(node) :]
        if node not in done:
            path.append(node)
            for other in sorted(graph.get(node, ())):
                if found := visit(other):
                    return found
            done.add(path.pop())
        return None

    return next((found for node in sorted(graph) if (found := visit(node))), None)


@pytest.mark.parametrize("room", ["backends/processes", "runtime"])
def test_no_circle_of_imports(room):
    files = {f"distir.{room}.{p.stem}".replace("/", "."): p for p in (PACKAGE / room).glob("*.py")}
    assert cycle({name: {n for _, n in imported(p) if n in files} for name, p in files.items()}) is None


def test_a_circle_is_seen():
    assert cycle({"a": {"b", "c"}, "b": set(), "c": {"d"}, "d": {"c"}}) == ["c", "d"]
