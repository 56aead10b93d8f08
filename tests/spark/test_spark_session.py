"""What is missing for Spark is told in a sentence; and what is loaded when."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import embedlog
from embedlog.errors import SparkSetupError
from embedlog.spark import spark_session


def script(directory, name, text):
    """Write a program."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def lines(code):
    """Run Python in a process of its own; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_without_java_it_says_what_to_install(monkeypatch, tmp_path):
    """Spark's own error is of a script that is not there."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SparkSetupError, match=r"no java on PATH.*Install a JRE 17"):
        spark_session.find_java()


def test_a_wrong_java_home_is_told(monkeypatch, tmp_path):
    """It comes before PATH, for Spark too."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(SparkSetupError, match=r"JAVA_HOME=.* has no bin/java"):
        spark_session.find_java()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo 'openjdk version \"11.0.2\" 2019-01-15' >&2", "Java has version 11"),
        ("echo 'java version \"1.8.0_292\"' >&2", "Java has version 1"),
        ("echo 'no such thing' >&2; exit 1", "Java does not run: no such thing"),
    ],
)
def test_another_java_is_told(monkeypatch, tmp_path, text, told):
    """Spark 4 needs 17."""
    script(tmp_path, "bin/java", text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(SparkSetupError, match=told):
        spark_session.check_driver()


@pytest.mark.parametrize("name", ["pyspark", "pyarrow"])
def test_a_missing_package_is_told(monkeypatch, name):
    """With what to install, and for which Python."""
    found = spark_session.importlib.util.find_spec
    monkeypatch.setattr(
        spark_session.importlib.util,
        "find_spec",
        lambda each: None if each == name else found(each),
    )

    with pytest.raises(SparkSetupError, match=f"{name} is not installed for .*pip install"):
        spark_session.check_driver()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('echo \'{"version": [3, 9], "missing": []}\'', "workers' Python is 3.9, the driver's"),
        (
            'echo \'{"version": [3, 11], "missing": ["pyarrow (No module)"]}\'',
            "lacks pyarrow",
        ),
        ("exit 3", "does not run"),
    ],
)
def test_workers_with_another_python_are_told(tmp_path, text, told):
    """Spark starts `python3` unless told otherwise: often not the one of the environment."""
    python = script(tmp_path, "python3", text)

    with pytest.raises(SparkSetupError, match=rf"{told}[\s\S]*PYSPARK_PYTHON={sys.executable}"):
        spark_session.check_worker_python(python)


def test_workers_with_the_same_packages_are_fine(tmp_path):
    """However their Python is called."""
    spark_session.check_worker_python(None)
    spark_session.check_worker_python(sys.executable)
    spark_session.check_worker_python(script(tmp_path, "other", f'exec "{sys.executable}" "$@"'))


def test_java_is_told_how_to_log_only_while_it_starts(monkeypatch, tmp_path):
    """By a file that is there; whatever a user has said goes before it."""
    name = "LOG4J_CONFIGURATION_FILE"
    monkeypatch.delenv(name, raising=False)
    (tmp_path / "log4j2.properties.template").touch()
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    with spark_session.default_log4j_settings():
        assert Path(os.environ[name]).read_text().startswith("#")
    assert name not in os.environ

    (tmp_path / "log4j2.properties").touch()
    with spark_session.default_log4j_settings():
        assert name not in os.environ

    monkeypatch.delenv("SPARK_CONF_DIR")
    monkeypatch.setenv(name, "mine.xml")
    with spark_session.default_log4j_settings():
        assert os.environ[name] == "mine.xml"
    assert os.environ[name] == "mine.xml"


def test_a_session_of_another_kind_is_told():
    """One without Python data sources."""
    with pytest.raises(SparkSetupError, match="no Python data sources"):
        spark_session.register(object())


def test_the_settings_are_texts_and_include_the_workers_python():
    """As `SparkSession.builder.config` takes them."""
    conf = spark_session.recommended_conf()

    assert all(isinstance(value, str) for value in conf.values())
    assert conf["spark.python.unix.domain.socket.enabled"] == "true"
    assert conf["spark.pyspark.python"] == os.environ.get("PYSPARK_PYTHON", sys.executable)
    assert "spark.sql.python.filterPushdown.enabled" not in conf


def test_the_room_is_light():
    """An executor that reads loads neither LMDB nor pandas; `import embedlog` not even pyarrow."""
    assert lines("import sys, embedlog.spark; print('pyspark' in sys.modules)") == ["False"]
    code = "import sys, embedlog.spark.partition_reader; print({'lmdb', 'pandas'} & {*sys.modules})"
    assert lines(code) == ["set()"]
    assert embedlog.spark.register is spark_session.register


def test_spark_finds_the_source_by_itself():
    """A module of that name with that attribute; it loads no more than pyspark does."""
    code = (
        "import sys, pyspark.sql.datasource; before = {*sys.modules}; import pyspark_embedlog as m;"
        "print(m.DefaultSource.name(), 'pyarrow' in {*sys.modules} - before)"
    )
    assert lines(code) == ["embedlog", "False"]


def test_the_module_that_spark_finds_never_raises():
    """One that does disables all data sources in Python."""
    code = (
        "import sys; sys.modules['pyspark.sql.datasource'] = None;"
        "import pyspark_embedlog; print(hasattr(pyspark_embedlog, 'DefaultSource'))"
    )
    assert lines(code) == ["False"]
