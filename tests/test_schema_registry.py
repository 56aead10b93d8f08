"""The schema registry: ids, versions and compatibility, as in Confluent's; and its command line."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from functools import partial

import pytest
from support.children import run_python
from support.roots import healthy_log

import embedlog
from embedlog.display import need
from embedlog.errors import (
    CorruptionError,
    EmbedlogError,
    IncompatibleSchemaError,
    InvalidConfigError,
    InvalidSchemaError,
    ReadOnlyError,
    UnknownSchemaError,
)
from embedlog.registry import avro_schema
from embedlog.registry.schema_registry import LEVELS

pytest.importorskip("avro")
pytest.importorskip("fastavro")


def record(*fields, name="Order"):
    """Return the schema of a record; a field is a name, a type and perhaps a default."""
    keys = ("name", "type", "default")
    return {
        "type": "record",
        "name": name,
        "fields": [dict(zip(keys, field, strict=False)) for field in fields],
    }


ITEM = ("item", "string")
FIRST = record(ITEM)
WITH_DEFAULT = record(ITEM, ("price", "double", 0.0))
WITHOUT_DEFAULT = record(ITEM, ("price", "double"))
ONLY_PRICE = record(("price", "double", 0.0))


log = healthy_log


@pytest.fixture
def schemas(log):
    """The registry of the log."""
    return log.schema_registry


# Ids and versions


def test_ids_are_global_and_versions_count_in_a_subject(schemas):
    """Equal schemas have one id, whatever their blanks and the order of their attributes."""
    other_order = '{"fields": [{"type": "string", "name": "item"}],\n "name":"Order",'
    assert schemas.register("a-value", FIRST) == 1
    assert schemas.register("b-value", other_order + '"type":"record"}') == 1
    assert schemas.register("a-value", WITH_DEFAULT) == 2
    assert schemas.register("a-value", FIRST) == 1
    nested = record(("item", {"type": "string"}))
    assert schemas.register("a-value", nested) == 1

    assert schemas.subjects() == ["a-value", "b-value"]
    assert (schemas.versions("a-value"), schemas.versions("b-value")) == ([1, 2], [1])
    assert json.loads(schemas.get(2)) == WITH_DEFAULT
    latest = schemas.latest("a-value")
    assert latest == schemas.version("a-value", 2) == schemas.lookup("a-value", WITH_DEFAULT)
    assert (latest.id, latest.subject, latest.version) == (2, "a-value", 2)
    assert json.loads(latest.schema) == WITH_DEFAULT


def test_the_registry_survives_the_log_and_topics(tmp_path):
    """A topic that is deleted leaves its subjects, which may serve others."""
    with embedlog.open(tmp_path / "log") as log:
        log.create_topic("a")
        log.schema_registry.register("a-value", FIRST)
        log.schema_registry.set_compatibility("FULL")
        log.delete_topic("a")
    with embedlog.open(tmp_path / "log", mode="r") as log:
        assert json.loads(log.schema_registry.latest("a-value").schema) == FIRST
        assert log.schema_registry.compatibility("x") == "FULL"
        assert log.schema_registry.register("a-value", FIRST) == 1  # It is registered.
        with pytest.raises(ReadOnlyError):
            log.schema_registry.register("a-value", WITH_DEFAULT)
        with pytest.raises(ReadOnlyError):
            log.schema_registry.delete("a-value")
        with pytest.raises(ReadOnlyError):
            log.schema_registry.set_compatibility("NONE")


def test_what_is_deleted_stays_readable_by_its_id(schemas):
    """Records may have the id; numbers of versions are not used again."""
    schemas.register("a-value", FIRST)
    schemas.register("a-value", WITH_DEFAULT)

    assert schemas.delete("a-value", 1) == [1]
    assert schemas.versions("a-value") == [2]
    with pytest.raises(UnknownSchemaError, match="no version 1, only 2"):
        schemas.version("a-value", 1)
    with pytest.raises(UnknownSchemaError, match="no version 1, only 2"):
        schemas.delete("a-value", 1)
    assert schemas.register("a-value", FIRST) == 1
    assert schemas.versions("a-value") == [2, 3]

    schemas.set_compatibility("FULL", "a-value")
    assert schemas.delete("a-value") == [2, 3]
    assert schemas.subjects() == []
    assert schemas.compatibility("a-value") == "BACKWARD"
    assert (json.loads(schemas.get(1)), json.loads(schemas.get(2))) == (FIRST, WITH_DEFAULT)
    # No version is left that it would have to be compatible with.
    assert schemas.register("a-value", {"type": "string"}) == 3
    assert schemas.versions("a-value") == [4]


@pytest.mark.parametrize(
    "call",
    [
        lambda schemas: schemas.latest("x"),
        lambda schemas: schemas.versions("x"),
        lambda schemas: schemas.version("x", 1),
        lambda schemas: schemas.lookup("x", FIRST),
        lambda schemas: schemas.lookup("a-value", WITH_DEFAULT),
        lambda schemas: schemas.delete("x"),
        lambda schemas: schemas.delete(""),
        *(
            partial(lambda number, schemas: schemas.get(number), n)
            for n in (0, 2, -1, 1 << 31, "1")
        ),
    ],
)
def test_what_is_unknown_is_a_typed_error(schemas, call):
    """It says what there is, or how to register."""
    schemas.register("a-value", FIRST)
    with pytest.raises(UnknownSchemaError):
        call(schemas)


@pytest.mark.parametrize("subject", ["", "x" * 401, "a\0b", "a\nb", 5])
def test_a_subject_has_a_name_that_can_be_printed(schemas, subject):
    """And fits into a key of LMDB."""
    with pytest.raises(InvalidSchemaError, match="subject"):
        schemas.register(subject, FIRST)
    assert schemas.register("x" * 400, FIRST) == 1
    assert schemas.subjects() == ["x" * 400]


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "{",
        "[" * 100_000,
        "strin",
        5,
        None,
        {"type": "recor"},
        {"type": "record", "name": "R"},
        record(ITEM, ITEM),
        record(("a b", "int")),
        record(("a", "int", "x")),
        record(("a", "other.Record")),
        ["int", "int"],
        {"type": "string", "x": {1}},
        {"type": "enum", "name": "E", "symbols": ["a", "a"]},
    ],
)
def test_what_is_no_schema_of_avro_is_refused(schemas, schema):
    """With the reason; nothing is registered, and no id is used up."""
    # Finalizers of other tests' objects must not run at the end of the stack.
    gc.collect()
    with pytest.raises(InvalidSchemaError, match="not a valid schema of Avro: "):
        schemas.register("a-value", schema)
    with pytest.raises(InvalidSchemaError):
        schemas.check("a-value", schema)
    assert schemas.subjects() == []
    assert schemas.register("a-value", "string") == 1


def test_a_schema_that_is_nested_too_deeply_is_refused(schemas):
    """Rather than ending the process."""
    schema = "int"
    for _ in range(sys.getrecursionlimit()):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidSchemaError):
        schemas.register("a-value", schema)


# Compatibility

RENAMED = {**record(("product", "string")), "aliases": ["Order"]}
RENAMED["fields"][0]["aliases"] = ["item"]
ENUM = {"type": "enum", "name": "E", "symbols": ["a", "b"]}
CHANGES = {
    "a field with a default is added": (FIRST, WITH_DEFAULT, True, True),
    "a field without a default is added": (FIRST, WITHOUT_DEFAULT, False, True),
    "a field with a default is dropped": (WITH_DEFAULT, FIRST, True, True),
    "a field without a default is dropped": (WITHOUT_DEFAULT, FIRST, True, False),
    "an int becomes a long": ("int", "long", True, False),
    "a long becomes an int": ("long", "int", False, True),
    "a type changes": ("int", "string", False, False),
    "null is allowed": ("int", ["null", "int"], True, False),
    "a symbol is added": (ENUM, {**ENUM, "symbols": ["a", "b", "c"]}, True, False),
    "a field is renamed by an alias": (FIRST, RENAMED, True, False),
    "a record has another name": (FIRST, record(ITEM, name="Sale"), False, False),
    "only the text differs": (FIRST, {**FIRST, "doc": "An order."}, True, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_level_decides_which_changes_are_accepted(schemas, change):
    """BACKWARD by default; what is refused changes nothing, and the reasons are in the error."""
    before, after, backward, forward = CHANGES[change]
    accepted = {
        "NONE": True,
        "BACKWARD": backward,
        "FORWARD": forward,
        "FULL": backward and forward,
    }
    schemas.register("a", before)
    assert (schemas.check("a", after) == []) == backward
    for number, level in enumerate(LEVELS):
        subject = f"s{number}"
        schemas.set_compatibility(level.lower(), subject)
        assert schemas.compatibility(subject) == level
        assert schemas.check(subject, after) == []
        schemas.register(subject, before)
        reasons = schemas.check(subject, after)
        assert (not reasons) == accepted[level.partition("_")[0]]
        if not reasons:
            schemas.register(subject, after)
            continue
        assert all("version 1" in reason and len(reason) > 40 for reason in reasons)
        with pytest.raises(IncompatibleSchemaError) as refused:
            schemas.register(subject, after)
        assert refused.value.reasons == reasons
        assert refused.value.subject == subject
        assert reasons[0] in str(refused.value)
        assert schemas.versions(subject) == [1]


def test_a_transitive_level_compares_with_all_versions(schemas):
    """The others with the latest one only; deleted versions do not count."""
    versions = FIRST, record(ITEM, ("price", "double", 0.0)), ONLY_PRICE
    string_again = record(("item", "int", 0), ("price", "double", 0.0))
    for subject in ("a", "b"):
        for version in versions:
            schemas.register(subject, version)
    schemas.set_compatibility("BACKWARD_TRANSITIVE", "b")

    assert schemas.check("a", string_again) == []
    reasons = schemas.check("b", string_again)
    assert ["version 2" in reasons[0], "version 1" in reasons[1]] == [True, True]
    schemas.delete("b", 1)
    schemas.delete("b", 2)
    assert schemas.check("b", string_again) == []


def test_a_level_of_a_subject_comes_before_the_global_one(schemas):
    """None returns to the default."""
    schemas.set_compatibility("NONE")
    schemas.set_compatibility("FULL", "a")
    assert [schemas.compatibility(subject) for subject in (None, "a", "b")] == [
        "NONE",
        "FULL",
        "NONE",
    ]
    schemas.set_compatibility(None, "a")
    schemas.set_compatibility(None)
    assert schemas.compatibility("a") == schemas.compatibility() == "BACKWARD"
    for level in ("BACK", 5):
        with pytest.raises(InvalidConfigError, match="FORWARD_TRANSITIVE"):
            schemas.set_compatibility(level)


# Processes, copies and damage

REGISTER = """
import sys, embedlog
with embedlog.open(sys.argv[1], maintenance=False) as log:
    for number in range(20):
        fields = [{"name": f"f{number}", "type": "int", "default": 0}]
        own = {"type": "record", "name": "R" + sys.argv[2], "fields": fields}
        log.schema_registry.set_compatibility("NONE", sys.argv[2])
        shared = {**own, "name": "Shared"}
        register = log.schema_registry.register
        print(register(sys.argv[2], own), register("shared", shared))
"""


def test_processes_register_at_once(tmp_path):
    """No id is assigned twice, and equal schemas get one id in all processes."""
    with embedlog.open(tmp_path / "log") as log:
        log.schema_registry.set_compatibility("NONE", "shared")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        outputs = list(
            pool.map(lambda name: run_python("-c", REGISTER, tmp_path / "log", name), "abc")
        )
    rows = [[line.split() for line in output.splitlines()] for output in outputs]
    own = [int(row[0]) for process in rows for row in process]
    shared = [[int(row[1]) for row in process] for process in rows]

    assert len(set(own)) == 60
    assert shared[0] == shared[1] == shared[2]
    assert sorted({*own, *shared[0]}) == list(range(1, 81))
    with embedlog.open(tmp_path / "log") as log:
        assert log.schema_registry.versions("shared") == list(range(1, 21))


def test_an_older_copy_of_state_does_not_assign_the_ids_of_lost_schemas(tmp_path):
    """Records with these ids are refused rather than read with another schema."""
    path = tmp_path / "log"
    with embedlog.open(path) as log:
        log.create_topic("a", value="avro")
        log.schema_registry.register("a-value", FIRST)
    shutil.copytree(path / "state.copy", tmp_path / "older")
    with embedlog.open(path) as log:
        log.schema_registry.register("a-value", WITH_DEFAULT)
        with log.producer() as producer:
            producer.send("a", {"item": "tea"})
    shutil.rmtree(path / "state.copy")
    (tmp_path / "older").rename(path / "state.copy")
    (path / "state" / "data.mdb").write_bytes(b"damaged" * 5000)
    with embedlog.open(path) as log:
        assert log.schema_registry.versions("a-value") == [1]
        assert log.schema_registry.register("a-value", ONLY_PRICE) > 1_000_000
        with pytest.raises(EmbedlogError, match="no schema with the id 2"):
            log["a"][0]
        # Registering it again does not bring the id back.
        assert log.schema_registry.register("b-value", WITH_DEFAULT) > 1_000_000


def test_a_damaged_row_of_a_subject_is_an_error_of_this_subject(log):
    """The rows of the registry have checksums, as all rows of `state`."""
    from embedlog.keyspace import SUBJECT_VERSIONS

    log.schema_registry.register("a", FIRST)
    log.schema_registry.register("b", FIRST)
    state, key = log.root.context.state, SUBJECT_VERSIONS.key("a", 1)
    good = state.get(key)
    state.write(lambda txn: txn.put(key, good[:-1] + b"\7"))
    with pytest.raises(CorruptionError):
        log.schema_registry.latest("a")
    assert log.schema_registry.latest("b").id == 1
    state.write(lambda txn: txn.put(key, good))


def test_a_missing_library_says_what_to_install(monkeypatch, schemas):
    """It is an extra."""
    avro_schema.parse_stored.cache_clear()
    for name in ("fastavro", "avro"):
        with monkeypatch.context() as patch:
            for module in list(sys.modules):
                if module.partition(".")[0] == name:
                    patch.delitem(sys.modules, module)
            patch.setitem(sys.modules, name, None)
            with pytest.raises(EmbedlogError, match=r'pip install "embedlog\[avro\]"'):
                schemas.register("a", {**FIRST, "doc": name})
    assert need("fastavro").schemaless_writer


# The command line


@pytest.fixture
def run(command_line, log_path):
    """Run a verb of `embedlog schemas` in this process; return its code, stdout and stderr."""
    return partial(command_line, "schemas")


@pytest.fixture
def file_of(tmp_path):
    """Return the path of a new file with a schema."""

    def write(schema):
        path = tmp_path / "schema.avsc"
        path.write_text(json.dumps(schema))
        return path

    return write


def test_the_command_line_does_what_the_registry_does(run, file_of):
    """Register, list, show, check, set a level, delete; with exit codes for scripts."""
    assert run("register", "a-value", file_of(FIRST)) == (
        0,
        "The schema is version 1 of a-value, with the id 1\n",
        "",
    )
    code, out, _ = run("check", "a-value", file_of(WITHOUT_DEFAULT))
    assert (code, "the field price has no default" in out) == (1, True)
    code, _, err = run("register", "a-value", file_of(WITHOUT_DEFAULT))
    assert (code, "no default" in err) == (2, True)
    assert run("check", "a-value", file_of(WITH_DEFAULT))[0] == 0
    run("register", "a-value", file_of(WITH_DEFAULT))
    code, out, _ = run("list")
    assert out.splitlines()[1].split() == ["a-value", "2", "2", "BACKWARD"]
    assert json.loads(run("show", "a-value")[1]) == WITH_DEFAULT
    assert json.loads(run("show", "a-value:1")[1]) == FIRST
    assert run("compatibility", "a-value", "--set", "full") == (0, "FULL\n", "")
    assert run("compatibility") == (0, "BACKWARD\n", "")
    assert run("compatibility", "--set", "none")[1] == "NONE\n"
    assert run("compatibility", "--set", "some")[0] == 2
    assert run("delete", "a-value", "--version", "1")[1] == "Deleted 1 version of a-value\n"
    assert run("show", "a-value:1")[0] == 3
    assert run("delete", "a-value")[0] == 0
    assert run("show", "a-value")[0] == 3
    assert run("register", "a-value", file_of("no schema"))[0] == 2


def test_the_command_line_prints_json(run, file_of):
    """One document for each command."""

    def document(*words):
        return json.loads(run(*words, "--json")[1])

    entry = {"subject": "a", "version": 1, "id": 1}
    assert document("register", "a", file_of(FIRST)) == entry
    assert document("list") == [{**entry, "compatibility": "BACKWARD"}]
    assert document("show", "a") == {**entry, "versions": [1], "schema": FIRST}
    checked = document("check", "a", file_of(FIRST))
    assert checked == {"compatible": True, "compatibility": "BACKWARD", "reasons": []}
    assert document("compatibility", "a") == {"subject": "a", "compatibility": "BACKWARD"}
    assert document("delete", "a") == {"subject": "a", "deleted": [1]}


@pytest.mark.parametrize("verb", ["list", "show", "register", "check", "compatibility", "delete"])
def test_each_verb_has_help_and_subjects_are_completed(run, command_line, file_of, verb):
    """As for the other commands."""
    run("register", "orders-value", file_of(FIRST))
    assert run(verb, "--help")[0] == 0
    _, out, _ = command_line("__complete", "schemas", verb, "")
    assert out.split() == ([] if verb == "list" else ["orders-value"])
