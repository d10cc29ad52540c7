"""The house: rooms import downward only, chains are short, and few things stand at the door.

A room is a folder of the package, or a file at its top. What counts is what a file imports when it is loaded; commands
import the engine later, after they have read their flags, and those imports must point down too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexgen_h2o

PACKAGE = Path(flexgen_h2o.__file__).parent
MOST_LEVELS, MOST_AT_THE_TOP, LONGEST_CHAIN = 12, 9, 16
# Rooms that must not know these others.
STRANGERS = {
    "engine": {"search", "jobs", "commands", "profiling"},
    "weights": {"search", "engine", "jobs"},
    "kvcache": {"models", "weights", "engine"},
    "models": {"kvcache", "weights", "engine"},
    "plan": {"memory", "kernels", "models", "kvcache", "weights", "engine"},
}
Edges = dict[str, set[str]]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """The folder that a module lies in; a file at the top is a room of its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST, everywhere: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Statements that import, but for those that type checkers alone read; those in functions only if `everywhere`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef) and not everywhere:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from imports(node, everywhere)


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The package's own modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in FILES)
        return
    for alias in node.names:
        below = f"{node.module}.{alias.name}"
        if below in FILES:
            yield below
        elif node.module in FILES:
            yield str(node.module)


@functools.cache
def edges(everywhere: bool) -> Edges:
    """What each module imports of the package."""
    found: Edges = {}
    for module, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[module] = {name for node in imports(tree, everywhere) for name in targets(node)} - {module}
    return found


def between_rooms(everywhere: bool) -> Edges:
    found: Edges = {room(module): set() for module in FILES}
    for module, others in edges(everywhere).items():
        found[room(module)] |= {room(other) for other in others} - {room(module)}
    return found


def longest_chain(graph: Edges) -> list[str]:
    """The longest way down. Fails if there is a circle."""
    chains: dict[str, list[str]] = {}

    def below(node: str, above: tuple[str, ...]) -> list[str]:
        assert node not in above, f"a circle: {' > '.join((*above, node))}"
        if node not in chains:
            ways = [below(other, (*above, node)) for other in sorted(graph[node])]
            chains[node] = [node, *max(ways, key=len, default=[])]
        return chains[node]

    return max((below(node, ()) for node in sorted(graph)), key=len)


@pytest.mark.parametrize("everywhere", [False, True])
def test_rooms_import_downward_only_and_in_few_levels(everywhere: bool) -> None:
    chain = longest_chain(between_rooms(everywhere))
    assert len(chain) <= MOST_LEVELS, " > ".join(chain)


def test_files_have_no_circles_either() -> None:
    longest_chain(edges(everywhere=True))


def test_chains_of_files_are_short() -> None:
    chain = longest_chain(edges(everywhere=False))
    assert len(chain) <= LONGEST_CHAIN, " > ".join(chain)


@pytest.mark.parametrize("name", STRANGERS)
def test_rooms_do_not_know_what_is_none_of_their_business(name: str) -> None:
    assert not between_rooms(everywhere=True)[name] & STRANGERS[name]


def test_few_things_stand_at_the_top() -> None:
    at_the_top = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(at_the_top) <= MOST_AT_THE_TOP, at_the_top


def test_every_room_says_what_it_is_about() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
