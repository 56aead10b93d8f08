"""The types of the public API: what type checkers accept, refuse and show, and what `dir` lists."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_overloads

import pytest
from support import option_types
from support.patience import patient

import embedlog
import embedlog.pipeline
import embedlog.spark
from embedlog.consumer.deserialize import TupleRecord
from embedlog.record import Record

ROOT = Path(__file__).parent.parent
CHECKED = Path(__file__).parent / "type_checks"
PACKAGE = Path(embedlog.__file__).parent

Errors = dict[str, list[str]]
"""By file and line, such as ``wrong.py:5``."""


def run_checker(*command: object) -> str:
    """Run a type checker, and return its output."""
    arguments = [sys.executable, "-m", *map(str, command)]
    # It fails, since there are errors.
    return subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=patient(120), check=False
    ).stdout


def mypy() -> Errors:
    """Return what mypy reports, with the settings of the project, which are strict."""
    errors: Errors = {}
    files = sorted(CHECKED.glob("*.py"))
    for line in run_checker("mypy", "--no-error-summary", *files).splitlines():
        if match := re.match(r"(?:.*/)?(\w+\.py:\d+): error: (.*)", line):
            errors.setdefault(match[1], []).append(match[2])
    return errors


def pyright() -> Errors:
    """Return what pyright reports in its strict mode."""
    errors: Errors = {}
    output = run_checker(
        "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", CHECKED
    )
    for error in json.loads(output)["generalDiagnostics"]:
        where = f"{Path(error['file']).name}:{error['range']['start']['line'] + 1}"
        errors.setdefault(where, []).append(error["message"])
    return errors


def marked() -> set[str]:
    """Return the lines that are to be refused."""
    lines = enumerate((CHECKED / "wrong.py").read_text().splitlines(), start=1)
    return {f"wrong.py:{number}" for number, line in lines if line.endswith("# wrong")}


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    "checker",
    [pytest.param(mypy, marks=pytest.mark.tier("all")), pyright],  # ten seconds, and two
    ids=lambda checker: checker.__name__,
)
def test_type_checkers_refuse_the_wrong_uses_and_no_others(checker):
    """In `type_checks/` each line that is marked is refused, and nothing else.

    The right uses state with `assert_type` which types the checker sees.
    """
    errors = checker()

    assert errors.keys() == marked(), {
        where: errors.get(where, "accepted") for where in errors.keys() ^ marked()
    }


def test_type_checkers_see_the_types():
    """The package says that it has types (PEP 561), and is not one whose names all exist."""
    assert (PACKAGE / "py.typed").is_file()
    for module in (embedlog, embedlog.spark, embedlog.pipeline):
        source = Path(module.__file__).read_text()
        assert re.search(r"^if not TYPE_CHECKING:\n\n    def __getattr__", source, re.MULTILINE)


def test_the_types_of_settings_are_those_of_the_configs():
    """`config/options.py` is generated."""
    assert option_types.FILE.read_text() == option_types.render(), "run `make option-types`"


# The public surface

START = [
    *(getattr(embedlog, name) for name in embedlog.__all__ if name != "errors"),
    *vars(embedlog.errors).values(),
    *(getattr(embedlog.spark, name) for name in embedlog.spark.__all__),
    *(getattr(embedlog.pipeline, name) for name in embedlog.pipeline.__all__),
]
INTERNAL = {"Maintenance", "PartitionLog"}
"""Classes below the API, which it returns for use inside of embedlog."""
CALLED = {"__contains__", "__enter__", "__getitem__", "__init__", "__iter__", "__len__", "__next__"}
"""Special methods that programs call by an operator or a statement."""

VALUES = {
    "Event.facts": "the facts of an event depend on its kind",
    "EmbedlogError.__init__": "the facts of an error depend on its class",
    "Settings.overrides": "the values of settings",
    "Settings.to_dict": "the values of settings",
    "Topic.config": "the values of settings",
    "TopicDescription.config": "the values of settings",
    "ColumnDescription.default": "the value of a column of any type",
    "TopicDescription.overrides": "the values of settings",
    "AuditReport.to_json": "JSON",
    "AuditedTopic.from_json": "JSON",
    "AuditedTopic.to_json": "JSON",
    "offsets_behind_latest": "JSON of Spark",
}
"""What may have `Any` in its types, and for which values."""


def classes_of_embedlog() -> dict[str, type]:
    """Return the classes of all modules that are loaded, by name; each name is defined once.

    Except for those of `embedlog.kafka`, which are named and typed as the libraries' own.
    """
    return {
        item.__name__: item
        for name, module in list(sys.modules.items())
        if name.startswith("embedlog") and not name.startswith("embedlog.kafka")
        for item in vars(module).values()
        if inspect.isclass(item) and item.__module__.startswith("embedlog")
    }


def members(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions and fields that programs use, as checkers see them, by name."""
    if not inspect.isclass(item):
        for function in get_overloads(item) or [item]:
            yield item.__name__, function
        return
    for owner in item.__mro__:
        if owner.__module__.startswith("embedlog"):
            public = (name for name in vars(owner) if not name.startswith("_") or name in CALLED)
            for name in public:
                member = inspect.getattr_static(owner, name)
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if inspect.isfunction(member):
                    for function in get_overloads(member) or [member]:
                        yield f"{owner.__name__}.{name}", function
            for name, annotation in inspect.get_annotations(owner).items():
                if not name.startswith("_"):
                    text = getattr(annotation, "__forward_arg__", annotation)
                    yield f"{owner.__name__}.{name}", text


def annotations(member: Any) -> dict[str, str]:
    """Return the annotations of a function or field, as they are written."""
    if isinstance(member, str):
        return {"return": member}
    return {name: str(text) for name, text in member.__annotations__.items()}


def public_surface() -> list[tuple[str, Any]]:
    """Return the functions and fields of the public objects, and of all that they return."""
    for name in ("api.log", "api.run_group", "compaction", "maintenance", "producer", "consumer"):
        importlib.import_module(f"embedlog.{name}")
    classes, surface = classes_of_embedlog(), []
    waiting = [item for item in START if inspect.isclass(item) or inspect.isfunction(item)]
    seen = set(waiting)
    while waiting:
        for name, member in members(waiting.pop()):
            surface.append((name, member))
            for word in re.findall(r"(?<![\w.])\w+", annotations(member).get("return", "")):
                item = classes.get(word)
                if item is not None and item not in seen and word not in INTERNAL:
                    seen.add(item)
                    waiting.append(item)
    return surface


def test_the_public_surface_has_precise_types():
    """Each parameter and each result has a type, and only values may be of any type."""
    surface = public_surface()
    names = {name for name, _ in surface}
    assert {"Lease.renew", "RecordFuture.result", "BatchRange.count", "CleanResult.why"} <= names
    offenders = []
    for name, member in surface:
        types = annotations(member)
        if not isinstance(member, str):
            parameters = list(inspect.signature(member).parameters)
            missing = [each for each in parameters if each not in {*types, "self", "cls"}]
            offenders += [f"{name}: {each} has no type" for each in missing]
            offenders += [f"{name} has no return type"] if "return" not in types else []
        if name not in VALUES and any(re.search(r"\bAny\b", text) for text in types.values()):
            offenders.append(f"{name}: {types}")
    assert not offenders, "\n" + "\n".join(offenders)
    assert VALUES.keys() <= names


# Records


def test_generic_records_are_plain_tuples():
    """They pickle as before, and are not larger or different because they are generic."""
    row = ("flights", 0, 5, 1000, 0, b"key", b"value", [], None)
    record = TupleRecord(row)

    assert tuple(record) == row
    assert type(pickle.loads(pickle.dumps(record))) is Record
    assert pickle.loads(pickle.dumps(record)) == Record(*row) == row
    assert sys.getsizeof(record) == sys.getsizeof(row)
    assert not hasattr(record, "__dict__")


def test_every_setting_has_a_type():
    """In both spellings, where both can be typed."""
    from embedlog.config import options

    for config, types in option_types.CONFIGS.items():
        names = {*config.__settings__}
        typed = set(getattr(options, types).__annotations__)
        assert names == {name for name in typed if "." not in name}
        assert {name.replace(".", "_") for name in typed if "." in name} <= names


# Completion

DIR = {
    "log": """
        aclose alter_topic at audit backup clone close consumer convert create_partitions
        create_topic
        dead_letters delete_records delete_topic describe_topic durability flush groups housekeeping
        metrics mirrors partition path producer prometheus replicas report schema_registry
        share_consumer snapshot
        snapshots sql topic topics transaction
    """,
    "housekeeping": """
        background compact hold leases rebuild_index repair retention_bytes run share verify
    """,
    "replicas": """
        add cancel_reassignment count elect_leaders index leaderless reassign remove rows title
        to_dict
    """,
    "mirrors": "count failover index",
    "groups": "get items keys values",
    "topic": """
        at batches before between config dataset describe_retention explain_compaction files get
        get_many head keys records_of
        in_ranges items name new optimize partition partitions plot ranges raw sample scan schema
        since splits
        size_bytes tail to_arrow to_pandas to_polars
    """,
    "mirror": "errors running status stop wait",
    "view": """
        at batches before between dataset files get get_many in_ranges items keys name plot ranges
        raw records_of sample scan schema since splits
        to_arrow to_pandas to_polars
    """,
    "group": """
        alter config delete delete_offsets describe lag members name remove_members reset_offsets
        state
    """,
    "share": """
        aclose acknowledge acquisition_lock_timeout_ms close commit getmany getone
        metrics poll set_acknowledgement_commit_callback subscribe subscription unsubscribe wakeup
    """,
    "producer": """
        abort_transaction aclose aflush append_table begin_transaction close commit_offsets
        commit_transaction
        flush init_transactions last_sequence metrics partitions_for send send_batch
        send_offsets_to_transaction
    """,
    "consumer": """
        aclose assign assignment beginning_offsets close commit commit_async committed
        create_message_streams current_lag end_offsets getmany getone group_metadata highwater
        iter_batches
        iter_records metrics offsets_for_times partitions_for_topic pause paused poll poll_batches
        position resume seek seek_to_beginning seek_to_end stop_at subscribe subscription topics
        unsubscribe wakeup
    """,
    "run": "close pids running stop wait",
    "schemas": """
        check compatibility delete get latest lookup register rows set_compatibility subjects
        version versions
    """,
}
"""What completion offers; a new public name is a decision, and is added here."""


def test_dir_lists_what_programs_may_use(tmp_path):
    """And nothing else: no internals, and nothing that only Python calls."""
    with embedlog.open(tmp_path / "log", maintenance=False) as log:
        topic, group = log.create_topic("t"), log.groups["g"]
        with log.producer() as producer, log.consumer("t") as consumer:
            run = embedlog.run_group(log, "t", "g", print, processes=1, start_method="fork")
            run.close()
            mirror = embedlog.mirror(log, tmp_path / "copy", progress=False)
            objects = {
                "log": log,
                "topic": topic,
                "mirror": mirror,
                "view": topic[:1],
                "group": group,
                "producer": producer,
                "consumer": consumer,
                "share": log.share_consumer("t", group="s"),
                "run": run,
                "schemas": log.schema_registry,
                "housekeeping": log.housekeeping,
                "replicas": log.replicas,
                "mirrors": log.mirrors,
                "groups": log.groups,
            }
            listed = {name: [*dir(item)] for name, item in objects.items()}
            for name, item in objects.items():
                assert all(hasattr(item, each) for each in listed[name])

    differences = {
        name: difference
        for name, names in DIR.items()
        if (difference := {*listed[name]} ^ {*names.split()})
    }
    assert differences == {}
