"""Reads input partitions with the reader in the JVM, in a JVM without a Spark session.

The classes are the real ones; `ReadTasks.java` does what an executor does with them.  So
thousands of cases take seconds, and a crash of the JVM ends no session.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from embedlog import errors
from embedlog.spark.errors import to_embedlog_error
from embedlog.spark.partition_reader import read_input_partition
from embedlog.spark.plan import LogInputPartition, plan_to_json
from support.patience import patient
from support.spark_reads import ALL

_SOURCES = [Path(__file__).with_name(f"{name}.java") for name in ("ReadTasks", "TypedValues")]
_JAR = Path(errors.__file__).parent / "spark" / "embedlog-spark.jar"
_MEMORY = "384m"
"""For the heap, and as much for direct memory: a hostile length must not take more."""
_OPENED = ("java.lang", "java.nio", "sun.nio.ch", "java.util")
"""Packages that Spark opens to itself."""
_LONG = (-(1 << 63), (1 << 63) - 1)
_SECONDS = 20.0

Row = tuple[Any, ...]


class JvmCrashError(AssertionError):
    """The JVM died, did not answer, or failed with another error than one of embedlog."""


class JvmTasks:
    """A JVM that reads input partitions; start it in a directory for its classes."""

    def __init__(self, directory: Path) -> None:
        javac, java = _tool("javac"), _tool("java")
        if javac is None or java is None or not _JAR.exists():
            pytest.skip("there is no JDK, or no jar of the reader")
        import pyspark

        jars = os.pathsep.join(
            [str(_JAR), os.path.join(os.path.dirname(pyspark.__file__), "jars/*")]
        )
        command = [javac, "-proc:none", "-nowarn", "-cp", jars, "-d", str(directory)]
        subprocess.run([*command, *map(str, _SOURCES)], check=True)
        opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
        memory = [f"-Xmx{_MEMORY}", f"-XX:MaxDirectMemorySize={_MEMORY}", "-XX:+UseSerialGC"]
        self._command = [
            *(java, *opened, *memory, "-XX:TieredStopAtLevel=1", "-XX:-CreateCoredumpOnCrash"),
            *(f"-XX:ErrorFile={directory}/crash.log", "-cp", f"{directory}{os.pathsep}{jars}"),
            "embedlog.spark.ReadTasks",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""

    def close(self) -> None:
        """End the JVM."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()

    def read(
        self,
        tasks: Sequence[LogInputPartition],
        names: Sequence[str] = ALL,
        fail_on_data_loss: bool = True,
        times: tuple[int, int] = _LONG,
        limit: int = -1,
    ) -> list[Row]:
        """Read input partitions, and return their rows as `python_rows` does.

        Args:
            tasks: The input partitions.
            names: The columns.
            fail_on_data_loss: The option of the reader.
            times: Timestamps in ms, both included; batches that have none of them are left out.
            limit: After so many rows each task ends; it may return more.

        Raises:
            EmbedlogError: As the reader does.
            JvmCrashError: Anything else happened.
        """
        root = tasks[0].root if tasks else ""
        request = {
            "plan": plan_to_json(root, tasks),
            "columns": list(names),
            "failOnDataLoss": fail_on_data_loss,
            "times": times,
            "limit": limit,
            "typed": None,
        }
        return [tuple(map(_value, names, row)) for row in self._rows(request)]

    def read_typed(
        self,
        reader: Mapping[str, Any],
        plan: Mapping[str, Any],
        schema: Any = None,
        fail_on_data_loss: bool = True,
        projection: str = "CODEGEN_ONLY",
    ) -> list[Row]:
        """Read typed topics, and return their rows with values as `spark_values` has them.

        Args:
            reader: What the planner answers to ``check_reader``.
            plan: What it answers to ``plan_batch``.
            schema: The columns to read, as ``StructType.json()``; None for all.
            fail_on_data_loss: The option of the reader.
            projection: How Spark copies rows: by generated code, or with ``NO_CODEGEN``.

        Raises:
            EmbedlogError: As the reader does.
            JvmCrashError: Anything else happened.
        """
        schema = json.loads(reader["schema"]) if schema is None else schema
        request = {
            "plan": plan,
            "columns": [field["name"] for field in schema["fields"]],
            "failOnDataLoss": fail_on_data_loss,
            "times": _LONG,
            "limit": -1,
            "typed": reader["typed"],
            "schema": json.dumps(schema),
            "projection": projection,
        }
        types = [field["type"] for field in schema["fields"]]
        return [
            tuple(_typed_value(value, kind) for value, kind in zip(row, types, strict=True))
            for row in self._rows(request)
        ]

    def _rows(self, request: Mapping[str, Any]) -> list[list[Any]]:
        answer = json.loads(self._ask(json.dumps(request).encode() + b"\n"))
        if "rows" in answer:
            rows: list[list[Any]] = answer["rows"]
            return rows
        error = to_embedlog_error(RuntimeError(answer["error"]))
        if isinstance(error, errors.SparkQueryError):
            raise JvmCrashError(answer["error"])
        raise error

    def _ask(self, line: bytes) -> bytes:
        if self._process is None:
            self._pending = b""
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line)
            stdin.flush()
            while b"\n" not in self._pending:
                ready, _, _ = select.select([stdout], [], [], patient(_SECONDS))
                data = os.read(stdout.fileno(), 1 << 20) if ready else b""
                if not data:
                    reason = "died" if ready else "did not answer"
                    raise JvmCrashError(f"The JVM {reason}: {line[:2000]!r}")
                self._pending += data
        except (BrokenPipeError, JvmCrashError) as error:
            self.close()
            raise JvmCrashError(str(error)) from error
        answer, self._pending = self._pending.split(b"\n", 1)
        return answer


def python_rows(
    tasks: Sequence[LogInputPartition], names: Sequence[str] = ALL, fail_on_data_loss: bool = True
) -> list[Row]:
    """Return the rows that the Python reader reads: values of the columns, times in µs."""
    rows = []
    for task in tasks:
        for batch in read_input_partition(task, tuple(names), fail_on_data_loss):
            columns = [
                # Python has fewer years than Spark.
                (column.cast("int64") if name == "timestamp" else column).to_pylist()
                for name, column in zip(names, batch.columns, strict=True)
            ]
            rows += [tuple(map(_plain, row)) for row in zip(*columns, strict=True)]
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [(header["key"].encode(), header["value"]) for header in value]
    return value


def _value(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name == "headers":
        return [(bytes.fromhex(key), None if v is None else bytes.fromhex(v)) for key, v in value]
    return bytes.fromhex(value) if name in ("key", "value") else value


def _typed_value(value: Any, spark_type: Any) -> Any:
    """Return a value of `TypedValues.java` as `spark_values` returns it."""
    if value is None:
        return None
    if isinstance(spark_type, dict):
        kind = spark_type["type"]
        if kind == "struct":
            types = [field["type"] for field in spark_type["fields"]]
            return [_typed_value(part, type_) for part, type_ in zip(value, types, strict=True)]
        if kind == "array":
            return [_typed_value(item, spark_type["elementType"]) for item in value]
        keys = [_typed_value(key, spark_type["keyType"]) for key in value[0]]
        return [keys, [_typed_value(item, spark_type["valueType"]) for item in value[1]]]
    if spark_type in ("float", "double"):
        return repr(float(value))
    return value


def spark_values(column: Any) -> list[Any]:
    """Return the values of an Arrow array of Spark's types: times as numbers, bytes as digits.

    A struct is a list of its fields, and a map a list of its keys and one of its values.
    """
    types, kind = pa.types, column.type
    if types.is_struct(kind):
        fields = [spark_values(field) for field in column.flatten()]
        rows = list(map(list, zip(*fields, strict=True)))
        return [row if valid else None for row, valid in zip(rows, column.is_valid(), strict=True)]
    if types.is_map(kind) or types.is_list(kind):
        is_map = types.is_map(kind)
        return [_items(item.values, is_map) if item.is_valid else None for item in column]
    if types.is_timestamp(kind) or types.is_duration(kind):
        return list(column.view(pa.int64()).to_pylist())
    if types.is_date32(kind):
        return list(column.view(pa.int32()).to_pylist())
    form = str
    if types.is_floating(kind):
        form = repr
    elif types.is_decimal(kind):
        form = "{:f}".format
    elif types.is_string(kind) or types.is_binary(kind):
        column, form = column.cast(pa.binary()), bytes.hex
    else:
        return list(column.to_pylist())
    return [None if value is None else form(value) for value in column.to_pylist()]


def _items(values: Any, is_map: bool) -> list[Any]:
    items = spark_values(values)
    if not is_map:
        return items
    return [[item[0] for item in items], [item[1] for item in items]]


def consumer_rows(log: Any, *topics: str) -> list[Row]:
    """Return the rows of all records of topics, as embedlog's own consumer reads them."""
    return [
        (
            *(record.key, record.value, record.topic, record.partition, record.offset),
            *(record.timestamp * 1000, record.timestamp_type),
            [(key.encode(), value) for key, value in record.headers] or None,
        )
        for topic in topics
        for record in log.topic(topic, raw=True)
    ]


def _tool(name: str) -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which(os.path.join(home, "bin", name) if home else name) or shutil.which(name)
