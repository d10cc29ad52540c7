"""The package as a whole: what imports what, how large its parts are, and that its README can be believed."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import ROOT, environment

from flexgen_h2o import convert, evaluate, profile_hardware
from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.bench import __main__ as bench
from flexgen_h2o.commands import run_options, search_options

PACKAGE = ROOT / "flexgen_h2o"
SOURCES = sorted(PACKAGE.rglob("*.py"))
README = ROOT / "README.md"
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
PARSERS = {
    "flexgen_h2o.evaluate": evaluate.build_parser,
    "flexgen_h2o.profile_hardware": profile_hardware.build_parser,
    "flexgen_h2o.bench": bench.build_parser,
    "flexgen_h2o.convert": convert.build_parser,
    "flexgen_h2o.policy_search": search_options.build_parser,
}
COMMANDS = {"run", "policy_search", "profile_hardware", "evaluate", "convert", "bench/sweep_command"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def is_command(path: Path) -> bool:
    name = str(path.relative_to(PACKAGE).with_suffix(""))
    return path.stem == "__main__" or name in COMMANDS or name.startswith("commands/")


def own_imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that an import statement loads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in MODULES)
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flexgen_h2o":
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in MODULES else str(node.module)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def loaded_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield node
            yield from loaded_nodes(node)


def import_graph() -> dict[str, set[str]]:
    """Every import of the package by the package, wherever it stands; but for the lazy root, and for types alone."""
    graph = {}
    for name, path in MODULES.items():
        found = {target for node in loaded_nodes(ast.parse(path.read_text())) for target in own_imports(node)}
        graph[name] = set() if name == "flexgen_h2o" else found - {"flexgen_h2o"}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph()
    assert sum(map(len, graph.values())) > 30  # the walk does see imports
    assert [name for name in graph if name in reachable(graph, name)] == []


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("flexgen_h2o.engine.loop", "flexgen_h2o.llm"),
        ("flexgen_h2o.engine.loop", "flexgen_h2o.engine.assemble"),
        ("flexgen_h2o.memory.transfer", "flexgen_h2o.weights.store"),
        ("flexgen_h2o.kvcache.buffer", "flexgen_h2o.engine.loop"),
        ("flexgen_h2o.kvcache.attention", "flexgen_h2o.plan.policy"),
        ("flexgen_h2o.models.opt", "flexgen_h2o.kvcache.buffer"),
        ("flexgen_h2o.weights.store", "flexgen_h2o.engine.loop"),
        ("flexgen_h2o.engine.sampling", "flexgen_h2o.engine.loop"),
        ("flexgen_h2o.llm", "flexgen_h2o.jobs.job"),
        ("flexgen_h2o.llm", "flexgen_h2o.evaluation.compare"),
        ("flexgen_h2o.llm", "flexgen_h2o.commands.command"),
    ],
)
def test_what_lies_below_does_not_know_what_lies_above(lower: str, upper: str) -> None:
    assert upper in MODULES
    assert upper not in reachable(import_graph(), lower)


PLAIN = """
basics.settings commands.command commands.run_options commands.search_options jobs.formats plan.model_shape
models.registry models.opt_config plan.policy plan.policy_files plan.run_settings plan.sampling plan.schedule
kvcache.eviction.registry kvcache.eviction.spec kvcache.eviction.h2o kvcache.eviction.full
kvcache.eviction.local kvcache.eviction.sink
"""


@pytest.mark.parametrize("name", PLAIN.split())
def test_plain_data_needs_no_torch(name: str) -> None:
    graph = import_graph()
    module = f"flexgen_h2o.{name}"
    for needed in {module} | reachable(graph, module):
        assert not re.search(r"^(import|from) torch", MODULES[needed].read_text(), re.MULTILINE), needed


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_only_commands_import_their_own_package_inside_functions(path: Path) -> None:
    inside = [target for function in functions(path) for node in ast.walk(function) for target in own_imports(node)]
    assert inside == [] or is_command(path) or path.name == "__init__.py"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(path)}
    assert [name for name, length in lengths.items() if length > MOST_FUNCTION_LINES] == []


def python(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_no_torch() -> None:
    loaded = python("import sys, flexgen_h2o, flexgen_h2o.run, flexgen_h2o.evaluate; print(*sys.modules)").split()
    assert "flexgen_h2o.run" in loaded
    assert {"torch", "numpy", "transformers"}.isdisjoint(loaded)


@pytest.mark.parametrize("name", ["kvcache", "kvcache.eviction"])
def test_rooms_that_plans_pass_through_import_nothing(name: str) -> None:
    nodes = ast.walk(ast.parse(MODULES[f"flexgen_h2o.{name}"].read_text()))
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)


def test_public_names_are_there_when_asked_for() -> None:
    import flexgen_h2o

    assert sorted(flexgen_h2o.__all__) == ["GenerationOutput", "LLM", "SamplingParams"]
    assert all(getattr(flexgen_h2o, name).__name__ == name for name in flexgen_h2o.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = flexgen_h2o.Engine


def readme_commands() -> list[str]:
    """Lines of bash blocks that start a command of the package, continued lines joined."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("python -m flexgen_h2o")]


def words_of(command: str) -> list[str]:
    """The words of a shell command up to its first pipe or redirection."""
    words = shlex.split(command, comments=True)
    ends = [index for index, word in enumerate(words) if re.fullmatch(r"\||&&|;|\d?>{1,2}.*|<.*", word)]
    return words[: min(ends, default=len(words))]


@pytest.mark.skipif(not README.exists(), reason="there is no README")
def test_the_readme_shows_commands() -> None:
    assert any(command.startswith("python -m flexgen_h2o.run") for command in readme_commands())


@pytest.mark.parametrize("command", readme_commands())
def test_commands_of_the_readme_are_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, argv = words_of(command)[2], words_of(command)[3:]
    if module == "flexgen_h2o.run":
        if "--input" in argv and (name := argv[argv.index("--input") + 1]) != "-":
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text("{}\n")
        if "--output" in argv:
            Path(argv[argv.index("--output") + 1]).parent.mkdir(parents=True, exist_ok=True)
        run_options.read_flags(argv)
    elif module in PARSERS:
        PARSERS[module]().parse_args(argv)
    else:
        assert f"{module}.__main__" in MODULES and argv == []


def test_a_command_that_does_not_parse_is_noticed() -> None:
    with pytest.raises(UsageError):
        run_options.read_flags(words_of("python -m flexgen_h2o.run --input - --promptlen 8 > out.jsonl")[3:])
    assert words_of("python -m flexgen_h2o.run --json | tail -1")[-1] == "--json"
