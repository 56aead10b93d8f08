"""The house rules, as tests: who may import whom, and how long things may be.

One test for each rule; it lists all that breaks it.
"""

import ast
import functools
import gc
import importlib.util
import re
import sys
import tomllib
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
from support.children import run_python

from embedlog import errors

# In one process, which reads the package once for all of them.
pytestmark = pytest.mark.xdist_group("house")

FLOORS = (
    {"errors", "forks", "hints", "version"},
    {"lazy"},
    {"record", "serializers", "callbacks", "checksum", "files", "tasks"},
    {"display", "failures", "metrics", "progress", "retry", "times"},
    {"config"},
    {"batch", "kv", "partitioner", "assignor"},
    {"keyspace", "schemas"},
    {"segment", "index", "catalog"},
    {"groups"},
    {"group"},
    {"partition"},
    {"publish", "splits"},
    {"listeners"},
    {"root"},
    {"registry", "replication", "snapshots", "dead_letter_queue"},
    {"retention", "compaction", "producer", "consumer", "audit"},
    {"maintenance", "convert", "share", "workers"},
    {"mirrors"},
    {"api"},
    {"server"},
    {"spark", "cli", "testing", "kafka", "opentelemetry"},
    {"pipeline"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
DOORS = {
    "lmdb": {"kv"},
    "sortedcontainers": {"partition"},
    "pyspark": {"spark"},
    "numpy": {
        *("audit", "batch", "cli", "compaction", "convert", "index", "mirrors"),
        *("partition", "server"),
        "partitioner",
        "pipeline",
        "schemas",
    },
    "matplotlib": {"api"},
    "cloudpickle": {"api"},
    "fsspec": {"files"},
    "pandas": {"spark"},
    "opentelemetry": {"opentelemetry"},
    "confluent_kafka": {"mirrors"},
    "avro": {"registry"},
    "fastavro": {"registry"},
    "pytest": {"testing"},
    "pyarrow": {
        *("files", "batch", "schemas", "segment", "partition", "root", "publish", "compaction"),
        *("producer", "consumer", "api", "cli", "spark", "pipeline", "convert", "splits"),
        *("audit", "mirrors", "server"),
    },
    **{library: {"checksum"} for library in ("crc32c", "crcmod", "google_crc32c")},
    **{module: {"files"} for module in ("fcntl", "mmap", "ctypes")},
    **{module: {"files", "cli", "testing"} for module in ("glob", "pathlib", "tempfile")},
    "shutil": {"files", "cli", "testing", "spark", "pipeline"},
}
# What stands for a library until it is used.
LAZY = {
    "embedlog.lazy.np": "numpy",
    "embedlog.lazy.pa": "pyarrow",
    "embedlog.lazy.pc": "pyarrow.compute",
}
# What of `os` is about the process, not about files.
OS_FOR_ALL = {
    *("PathLike", "cpu_count", "environ", "fsdecode", "fspath", "getpid", "kill", "path"),
    *("register_at_fork", "sched_getaffinity", "urandom"),
}
ROOF = FLOORS[-2] | FLOORS[-1]
TOP_FLOORS = {"api", *ROOF}
PACKAGE = Path(next(iter(importlib.util.find_spec("embedlog").submodule_search_locations)))
FILES = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
ROOM_FILES = [name for name in FILES if not name.startswith("__")]


@pytest.fixture(scope="module", autouse=True)
def no_collections():
    """Spare the garbage collector what is parsed, and the forks of later tests, too."""
    gc.disable()
    yield
    for cached in (parsed, nodes, imports, mentions, functions):
        cached.cache_clear()
    gc.enable()


@functools.cache
def parsed(name):
    """Return a file's syntax; not before a test asks, since the tests before this one fork."""
    return ast.parse((PACKAGE / name).read_text(), name)


def room_of(name):
    """Name the room that a file is, or that its folder is."""
    return name.split("/")[0].removesuffix(".py")


@functools.cache
def nodes(name):
    """Return all nodes of a file's syntax."""
    return tuple(ast.walk(parsed(name)))


def imported(found):
    """Yield every dotted name that nodes import, at the top or inside a function."""
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def for_types_only(name):
    """Yield what a file imports under TYPE_CHECKING, which nobody runs."""
    for node in nodes(name):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from chain.from_iterable(imported(ast.walk(each)) for each in node.body)


def dotted(node):
    """Return the name that a node writes out; None where it is more than names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return before and f"{before}.{node.attr}"


def mentioned(name):
    """Yield every dotted name in a file, written out or imported."""
    yield from imported(nodes(name))
    yield from filter(None, map(dotted, nodes(name)))


def assert_none(offenders):
    """Fail with all that breaks a rule, each in a line of its own."""
    assert not offenders, "\n" + "\n".join(offenders)


def uses(is_forbidden, but=()):
    """List the forbidden names that files mention, but for the files of some rooms."""
    return [
        f"{name} uses {mention}"
        for name in ROOM_FILES
        if room_of(name) not in but
        for mention in sorted(mentions(name))
        if is_forbidden(mention)
    ]


@functools.cache
def imports(name):
    """Return every dotted name that a file imports."""
    return frozenset(imported(nodes(name)))


@functools.cache
def mentions(name):
    """Return every dotted name in a file."""
    return frozenset(mentioned(name))


@functools.cache
def functions(name):
    """Return the functions of a file with their lines, docstring and blank lines not counted."""
    lines = (PACKAGE / name).read_text().splitlines()
    found = []
    for node in nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = set(range(node.lineno, node.end_lineno + 1))
            if ast.get_docstring(node) is not None:
                own -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            found.append((node.name, sum(bool(lines[number - 1].strip()) for number in own)))
    return found


def test_the_plan_has_each_room_and_no_other():
    """A new room is a decision: it goes into the table first."""
    rooms = {room_of(name) for name in ROOM_FILES}
    assert_none(sorted(rooms ^ FLOOR.keys()))


def test_a_room_imports_only_rooms_below_it():
    """Floors, so that each room can be read without those above it."""
    offenders = []
    for name in ROOM_FILES:
        room = room_of(name)
        for other in sorted(imports(name)):
            if other.startswith("embedlog."):
                below = other.split(".")[1]
                if below != room and FLOOR.get(below, 99) >= FLOOR[room]:
                    offenders.append(f"{name} imports {other}")
    assert_none(offenders)


def test_a_third_party_package_enters_through_its_door():
    """One room to change when a library changes."""
    offenders = []
    for name in FILES:
        for other in sorted(imports(name) - set(for_types_only(name))):
            doors = DOORS.get(LAZY.get(other, other).split(".")[0])
            if doors is not None and room_of(name) not in doors:
                offenders.append(f"{name} imports {other}")
    assert_none(offenders)


def test_a_package_from_outside_is_in_the_plan():
    """Nothing is depended upon without a door."""
    for_types = {"_typeshed", "typing_extensions", "polars"}
    known = {*DOORS, *sys.stdlib_module_names, *for_types, "embedlog"}
    offenders = [
        f"{name} imports {other}"
        for name in FILES
        for other in sorted(imports(name))
        if other.split(".")[0] not in known
    ]
    assert_none(offenders)


def touches_files(mention):
    """Whether a dotted name is of a function that asks the file system for something."""
    first, _, rest = mention.partition(".")
    if mention in {"open", "io.open"}:
        return True
    if first != "os" or not rest:
        return False
    asks = rest.startswith(("path.exists", "path.get", "path.is", "path.real"))
    return asks or rest.split(".")[0] not in OS_FOR_ALL


def test_only_files_touches_the_file_system():
    """One seam to the outside, with a cruel twin in the tests."""
    assert_none(uses(touches_files, but={"files", *ROOF}))


WALL_CLOCKS = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today"),
}


def test_nobody_below_the_engine_looks_at_the_wall_clock():
    """Time is passed in, so that retention and sessions are ordinary unit tests."""
    assert_none(uses(WALL_CLOCKS.__contains__, but=TOP_FLOORS))


def test_nobody_sleeps_but_on_a_lock():
    """Waiting is for an event, with a timeout, so that close() need not wait."""
    assert_none(uses(lambda mention: mention == "time.sleep", but={"files", "forks"}))


def test_chance_comes_from_a_generator_that_can_be_seeded():
    """`random.Random`, passed in; never the one that all share."""

    def shared(mention):
        return mention.startswith("random.") and mention not in {
            "random.Random",
            "random.SystemRandom",
        }

    assert_none(uses(shared))


def error_texts():
    """Yield what happened and what to do, wherever they are written out for an error.

    As file and line, argument, first literal and last one; "" where a value stands.
    """
    kinds = {kind for kind in vars(errors) if kind.endswith("Error")}
    for name in FILES:
        for node in nodes(name):
            if not isinstance(node, ast.Call):
                continue
            texts = [("todo", each.value) for each in node.keywords if each.arg == "todo"]
            if node.args and (texts or getattr(node.func, "id", None) in kinds):
                texts.append(("what", node.args[0]))
            for argument, text in texts:
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                literals = [part.value if isinstance(part, ast.Constant) else "" for part in parts]
                first, last = str(literals[0]), str(literals[-1])
                yield f"{name}:{node.lineno}", argument, first, last


def test_the_text_of_an_error_is_made_of_sentences():
    """What happened, whose period follows the place; then what to do, as whole sentences."""
    offenders = [
        f"{where}: {argument} is {first!r} … {last!r}"
        for where, argument, first, last in error_texts()
        if (argument == "what" and last.endswith((".", "!")))
        or (argument == "todo" and last and not last.endswith((".", "?")))
        or (argument == "todo" and re.match("[a-z]+ ", first))
    ]
    assert_none(offenders)


def test_a_context_manager_that_converts_errors_leaves_no_cycle_of_frames():
    """It would keep the frames of all callers until a collection: see `raised_in_body`."""
    found = [
        f"{name}:{each.lineno}: {ast.unparse(each)}"
        for name in FILES
        for function in nodes(name)
        if isinstance(function, ast.FunctionDef)
        and "contextmanager" in map(ast.unparse, function.decorator_list)
        for block in ast.walk(function)
        if isinstance(block, ast.Try)
        and any(isinstance(each, ast.Yield) for part in block.body for each in ast.walk(part))
        for handler in block.handlers
        for each in ast.walk(handler)
        if isinstance(each, ast.Raise) and isinstance(each.cause, ast.Name)
    ]
    assert_none(found)


def test_a_library_does_not_configure_logging():
    """Handlers and levels belong to the program."""
    forbidden = {"logging.basicConfig", "logging.StreamHandler", "logging.config"}
    assert_none(uses(forbidden.__contains__, but={"cli"}))


def test_a_file_has_a_name_that_says_something():
    """There is no drawer for what has no place."""
    drawers = {"utils", "util", "base", "helpers", "helper", "common", "misc", "core", "shared"}
    assert_none([name for name in FILES if Path(name).stem in drawers])


def test_a_file_says_what_it_is_for():
    """It has a docstring.  A file may be as long as the class or algorithm that it holds."""
    assert_none([name for name in FILES if not ast.get_docstring(parsed(name))])


def test_no_function_is_longer_than_a_screen():
    """At most 60 lines; the fast twins have in line what the general forms call."""
    long = [
        f"{name}: {function} has {lines} lines"
        for name in FILES
        for function, lines in functions(name)
        if lines > 60 and not function.endswith("_fast")
    ]
    assert_none(long)


def test_each_room_logs_under_its_own_name():
    """The logger of `embedlog/ROOM` is `embedlog.ROOM`, so that programs can choose by room."""
    named = re.compile(r"getLogger\((.*?)\)")
    offenders = [
        f"{name}: {argument}"
        for name in FILES
        for argument in named.findall((PACKAGE / name).read_text())
        if argument != f'"embedlog.{room_of(name)}"'
    ]
    assert_none(offenders)


def test_the_table_of_what_tests_share_is_complete():
    """`support/README.md` has a line for each file, and none for files that are gone."""
    support = Path(__file__).parent / "support"
    rows = [line for line in (support / "README.md").read_text().splitlines() if "| `" in line]
    listed = {row.split("`")[1] for row in rows if row.startswith("| `")}
    there = {path.name for path in support.iterdir() if path.suffix in {".py", ".java"}}
    assert listed == there - {"__init__.py"}


def test_importing_embedlog_is_light():
    """None of the heavy libraries; they load when first needed (bench_start.py has the time)."""
    modules = run_python("-c", "import sys, embedlog; print(*sys.modules)").split()

    assert not {"pyarrow", "pyspark", "numpy", "pandas"} & {*modules}


def module_of(name):
    """Return the dotted name of a file's module."""
    return ".".join(("embedlog", *name.removesuffix(".py").split("/"))).removesuffix(".__init__")


def import_graph():
    """Return the modules that each module imports, inside functions and for types too.

    Without those that it imports for types from its own package: two classes that work together
    may name each other.
    """
    modules = {module_of(name): name for name in FILES}
    graph = {}
    for module, name in modules.items():
        package = module.rpartition(".")[0] + "."
        types = {each for each in for_types_only(name) if each.startswith(package)}
        # `from package import name` is an import of a module, or of the package itself.
        targets = {
            other if other in modules else other.rpartition(".")[0]
            for other in imports(name) - types
        }
        graph[module] = targets & modules.keys() - {module}
    return graph


def cycles(graph):
    """Return the groups of nodes that can all reach each other."""
    reach = {}
    for start in graph:
        reached, left = set(), [start]
        while left:
            for other in graph[left.pop()] - reached:
                reached.add(other)
                left.append(other)
        reach[start] = reached
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(map(sorted, groups))


def test_a_class_name_is_defined_once():
    """Two packages that need the same name use different names.

    The clients in `kafka` have the names of Kafka's clients, which are also embedlog's.
    """
    homes = {}
    for name in FILES:
        if room_of(name) == "kafka":
            continue
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert_none([f"{name}: {', '.join(files)}" for name, files in homes.items() if len(files) > 1])


SAME_PART = {
    "__init__",
    "__main__",
    "context",  # what the objects of a package share
    "errors",  # the errors of everybody, and of Spark
    "files",  # of one directory, and of several
    "jobs",  # of the housekeeping, in general and of replication
    "counts",  # what producers and consumers count, from which their metrics are made
    "recovery",  # of a partition, and of a copy of it
    "root",  # in one directory, and in several
    "validation",  # what is refused: by a producer, by a topic
}


def test_a_module_name_that_occurs_twice_plays_the_same_part():
    """In `cli` and `config` a module has the name of the thing that it is the door or settings of.

    In `kafka` it has the name of the module of Kafka's client that it stands for.  Others that
    share a name are listed with the part that they play.
    """
    rooms = {}
    for name in FILES:
        room, _, module = name.removesuffix(".py").rpartition("/")
        named_after = room.split("/")[0] in {"cli", "config", "kafka"}
        if not named_after and module not in SAME_PART:
            rooms.setdefault(module, []).append(name)
    assert_none([f"{module}: {', '.join(names)}" for module, names in rooms.items() if names[1:]])


def test_modules_do_not_import_each_other_in_circles():
    """Each module can be understood after those that it imports."""
    assert cycles(import_graph()) == []


def fields_and_assignments():
    """Return the fields that each room declares, and the assignments to others than `self`."""
    fields, assigned = {}, []
    for name in FILES:
        declared = fields.setdefault(room_of(name), set())
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                declared |= {
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                    declared.add(node.attr)
                else:
                    assigned.append((name, node))
    return fields, assigned


def test_a_package_assigns_only_to_its_own_objects():
    """Fields belong to the package of their class, which alone keeps them consistent.

    An assignment `object.field = ...` on anything but `self` must name a field that a class
    of the same package declares, if any package of embedlog declares it.  Two fields of the
    same name in two packages are not told apart, nor is `setattr`.
    """
    fields, assigned = fields_and_assignments()
    declared = set().union(*fields.values())
    assert_none(
        [
            f"{name} assigns to {ast.unparse(node)}"
            for name, node in assigned
            if node.attr in declared - fields[room_of(name)]
        ]
    )


def test_the_architecture_lists_the_rooms_from_the_bottom():
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| package | what it does |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    listed = [room for row in rows for room in row]
    assert sorted(listed) == sorted(FLOOR)
    assert [FLOOR[room] for room in listed] == sorted(FLOOR[room] for room in listed)


@pytest.mark.tier("all")
def test_every_benchmark_can_be_collected():
    """They run seldom, so a name that moved would be missed for long."""
    root = Path(__file__).parent.parent
    run_python(
        *"-m pytest bench --collect-only -q -p no:xdist --benchmark-disable".split(), cwd=root
    )


def test_the_lowest_versions_are_declared_once_and_tried():
    """`make lowest` installs all that users can, and the tools of `dev` ask for the same."""
    project = tomllib.loads(
        (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    extras = project["optional-dependencies"]
    tried = re.search(
        r"^EXTRAS = (.*)$",
        (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8"),
        re.M,
    )
    assert sorted(tried[1].split()) == sorted(extras.keys() - {"dev", "docs"})
    declared = defaultdict(set)
    for extra in ("dev", *tried[1].split()):
        for requirement in extras[extra]:
            name, version = re.fullmatch(r"([\w-]+)(?:\[.*\])?(.*)", requirement).groups()
            declared[name].add(version)
    assert_none(
        [f"{name} is {versions}" for name, versions in declared.items() if len(versions) > 1]
    )
