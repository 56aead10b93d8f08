"""Checks before a session starts, its settings, and the imports of the packages."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import embedlog
import embedlog.spark
from embedlog import pipeline
from embedlog.errors import SparkSetupError
from embedlog.spark import spark_session


def script(directory, name, text):
    """Write a shell script; return its path."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def printed_words(code):
    """Run Python code in another process; return the words of its output."""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return process.stdout.split()


def test_without_java_the_error_says_what_to_install(monkeypatch, tmp_path):
    """Without the check, Spark's error would be about a missing script."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SparkSetupError, match=r"no java on PATH.*Install a JRE 17"):
        spark_session.find_java()


def test_a_wrong_java_home_is_an_error(monkeypatch, tmp_path):
    """JAVA_HOME takes precedence over PATH, as in Spark."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(SparkSetupError, match=r"JAVA_HOME=.* has no bin/java"):
        spark_session.find_java()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'openjdk version \"11.0.2\" 2019-01-15' >&2", "Java has version 11"),
        ("echo 'java version \"1.8.0_292\"' >&2", "Java has version 1"),
        ("echo 'no such thing' >&2; exit 1", "Java does not run: no such thing"),
    ],
)
def test_an_old_or_broken_java_is_an_error(monkeypatch, tmp_path, text, message):
    """Spark 4 needs Java 17."""
    script(tmp_path, "bin/java", text)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(SparkSetupError, match=message):
        spark_session.check_driver()


@pytest.mark.parametrize("name", ["pyspark", "pyarrow"])
def test_a_missing_package_is_an_error(monkeypatch, name):
    """The error says what to install, and for which Python."""
    find_spec = spark_session.importlib.util.find_spec
    monkeypatch.setattr(
        spark_session.importlib.util,
        "find_spec",
        lambda package: None if package == name else find_spec(package),
    )

    with pytest.raises(SparkSetupError, match=f"{name} is not installed for .*pip install"):
        spark_session.check_driver()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('echo \'{"version": [3, 9], "missing": []}\'', "workers' Python is 3.9, the driver's"),
        (
            'echo \'{"version": [3, 11], "missing": ["pyarrow (No module)"]}\'',
            "lacks pyarrow",
        ),
        ("exit 3", "does not run"),
    ],
)
def test_an_unsuitable_worker_python_is_an_error(tmp_path, text, message):
    """By default Spark starts `python3`, which is often not that of the virtual environment."""
    python = script(tmp_path, "python3", text)

    with pytest.raises(SparkSetupError, match=rf"{message}[\s\S]*PYSPARK_PYTHON={sys.executable}"):
        spark_session.check_worker_python(python)


def test_workers_with_the_same_packages_are_fine(tmp_path):
    """The name of the workers' Python does not matter."""
    spark_session.check_worker_python(sys.executable)
    spark_session.check_worker_python(script(tmp_path, "other", f'exec "{sys.executable}" "$@"'))


def test_the_log4j_settings_apply_only_while_java_starts(monkeypatch, tmp_path):
    """They do not override a configuration of the user."""
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
    monkeypatch.setenv(name, "own.xml")
    with spark_session.default_log4j_settings():
        assert os.environ[name] == "own.xml"
    assert os.environ[name] == "own.xml"


def test_a_session_without_python_data_sources_is_an_error():
    """Spark 3 has none."""
    with pytest.raises(SparkSetupError, match="no Python data sources"):
        spark_session.register(object())


def test_the_settings_are_strings_and_include_the_worker_python():
    """`SparkSession.builder.config` expects strings."""
    conf = spark_session.recommended_conf()

    assert all(isinstance(value, str) for value in conf.values())
    assert conf["spark.python.unix.domain.socket.enabled"] == "true"
    assert conf["spark.pyspark.python"] == os.environ.get("PYSPARK_PYTHON", sys.executable)
    assert "spark.sql.python.filterPushdown.enabled" not in conf


def test_executors_import_little():
    """A read imports neither LMDB nor pandas; `embedlog.spark` alone does not import pyspark."""
    assert printed_words("import sys, embedlog.spark; print('pyspark' in sys.modules)") == ["False"]
    code = "import sys, embedlog.spark.partition_reader; print({'lmdb', 'pandas'} & {*sys.modules})"
    assert printed_words(code) == ["set()"]
    assert embedlog.spark.register is spark_session.register


@pytest.mark.parametrize("package", [embedlog.spark, pipeline], ids=["spark", "pipeline"])
def test_no_module_has_the_name_of_a_public_function(package):
    """Otherwise the name would be the module or the function, depending on earlier imports."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}

    assert modules & {*package.__all__} == set()


def test_spark_can_find_the_source_on_its_own():
    """The module has the attribute that Spark expects, and imports no more than pyspark does."""
    code = (
        "import sys, pyspark.sql.datasource; before = {*sys.modules}; import pyspark_embedlog as m;"
        "print(m.DefaultSource.name(), 'pyarrow' in {*sys.modules} - before)"
    )
    assert printed_words(code) == ["embedlog", "False"]


def test_the_module_that_spark_finds_never_raises():
    """Otherwise Spark would find no Python data source at all."""
    code = (
        "import sys; sys.modules['pyspark.sql.datasource'] = None;"
        "import pyspark_embedlog; print(hasattr(pyspark_embedlog, 'DefaultSource'))"
    )
    assert printed_words(code) == ["False"]
