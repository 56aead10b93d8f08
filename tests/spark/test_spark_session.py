"""Checks before a session starts, its settings, and the imports of the packages."""

import os
import pkgutil
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from packaging.requirements import Requirement
from support.patience import patient

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


@pytest.mark.parametrize("extra", ["spark", "demo", "dev"])
def test_extras_with_pyspark_install_a_pandas_that_it_supports(extra):
    """It asks for pandas 2.2, which Python 3.13 has since 2.2.3, and warns of pandas 3."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    required = map(Requirement, project["optional-dependencies"][extra])
    specifiers = {requirement.name: requirement.specifier for requirement in required}

    assert "pyspark" in specifiers
    assert [specifiers["pandas"].contains(v) for v in ("2.1.4", "2.2.3", "3.0.0")] == [
        *(False, True, False)
    ]


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


# Spark's Python processes


def start_source_process(directory, **environment):
    """Start the process that plans a stream, as Spark does, with a `sitecustomize` of the user.

    It waits until its standard input is closed, as a busy machine may let imports wait.
    """
    (directory / "site").mkdir()
    (directory / "site" / "sitecustomize.py").write_text("import sys\nsys.stdin.read()\n")
    spark_session.add_worker_startup(environment)
    zipped = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
    path = [zipped, environment["PYTHONPATH"], directory / "site"]
    return subprocess.Popen(
        [sys.executable, "-m", "pyspark.sql.streaming.python_streaming_source_runner"],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, path))},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_source_process_connects_before_its_imports(tmp_path):
    """Spark waits for it for ten seconds; pyspark then uses the connection that is there."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        server.settimeout(patient(10))
        with start_source_process(
            tmp_path, PYTHON_WORKER_FACTORY_SOCK_PATH=str(tmp_path / "socket")
        ) as process:
            try:
                connection, _ = server.accept()
            finally:
                process.stdin.close()
            with connection:
                connection.settimeout(patient(20))
                pid = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")

    assert pid == process.pid


def test_a_source_process_that_cannot_connect_says_so(tmp_path):
    """The error is pyspark's, and comes from its package, not from the zip in it."""
    address = str(tmp_path / "closed")
    with start_source_process(tmp_path, PYTHON_WORKER_FACTORY_SOCK_PATH=address) as process:
        _, stderr = process.communicate()

    assert b"CANNOT_OPEN_SOCKET" in stderr
    assert b"pyspark.zip" not in stderr


def test_the_workers_path_keeps_what_is_on_it():
    """Registering again adds nothing."""
    environment = {"PYTHONPATH": "/mine"}
    spark_session.add_worker_startup(environment)
    spark_session.add_worker_startup(environment)

    startup, mine = environment["PYTHONPATH"].split(os.pathsep)
    assert mine == "/mine"
    assert Path(startup, "sitecustomize.py").is_file()


@pytest.fixture
def short_directory() -> Iterator[str]:
    """A directory for Unix sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="embedlog-") as directory:
        yield directory


@pytest.mark.parametrize(
    ("worker", "error"), [("pyspark.worker", b""), ("pyspark_broken", b"ZeroDivisionError")]
)
def test_the_daemon_prints_no_traceback_for_a_closed_socket(
    tmp_path, short_directory, worker, error
):
    """Spark closes sockets early after `show` and `limit`; other errors are printed."""
    (tmp_path / "pyspark_broken.py").write_text("1 / 0")
    environment = {
        "PYTHONPATH": str(tmp_path),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": short_directory,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
    }
    spark_session.add_worker_startup(environment)
    with subprocess.Popen(
        [sys.executable, "-m", "pyspark.daemon", worker],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as daemon:
        size = int.from_bytes(daemon.stdout.read(4), "big")
        address = daemon.stdout.read(size).decode()
        ended = not size  # before 4.2 the daemon itself imports the worker
        if size:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                worker_pid = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
                pidfd = os.pidfd_open(worker_pid)
            ended = select.select([pidfd], [], [], patient(20))[0]
            os.close(pidfd)
        _, stderr = daemon.communicate()

    assert ended
    assert (b"Traceback" in stderr, error in stderr) == (error != b"", True)


ENVIRONMENT = """
import os, embedlog.spark
before = dict(os.environ)
spark = embedlog.spark.session("environment", "local[1]", {"spark.ui.enabled": "false"})
with open(f"/proc/{spark.sparkContext._gateway.proc.pid}/environ") as file:
    print("worker_startup" in file.read())
print(os.environ.get("PYTHONPATH") == before.get("PYTHONPATH"))
spark.stop()
"""


@pytest.mark.tier("all")
@pytest.mark.xdist_group("spark")
def test_processes_that_spark_starts_by_itself_begin_with_our_startup():
    """Spark ends an idle one after a minute, whose daemon would print a traceback then."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Java is not installed")

    assert printed_words(ENVIRONMENT) == ["True", "True"]


SHOW = """
import sys, embedlog.spark
conf = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
conf["spark.embedlog.reader"] = sys.argv[2]
spark = embedlog.spark.session("show", "local[2]", conf)
frame = spark.read.format("embedlog").options(path=sys.argv[1], subscribe="t").load()
frame.select("offset").show(1)
frame.limit(1).collect()
print(frame.count())  # the daemon has ended the workers of the other queries
spark.stop()
"""


@pytest.mark.tier("all")
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("reader", ["jvm", "python"])
def test_a_session_prints_nothing_about_closed_sockets_or_pandas(log, reader):
    """Only a line of Java remains; `show` and `limit` stop while a worker has more rows."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Java is not installed")
    with log.producer() as producer:
        for _ in range(12_000):
            producer.send("t", b"x" * 2_000, partition=0)
    process = subprocess.run(
        [sys.executable, "-c", SHOW, log.path, reader], capture_output=True, text=True, check=True
    )

    assert process.stdout.split()[-1] == "12000"
    lines = process.stderr.splitlines()
    assert [line for line in lines if "incubator modules" not in line] == []
