"""Errors say what happened, where, and what to do, and pickling keeps all of it."""

import copy
import inspect
import pickle

import pytest

from embedlog import errors
from embedlog.hints import Hint, alter_topic, for_shell

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.EmbedlogError)
]
LOCATION = {"topic": "flights", "partition": 3, "offset": 42, "path": "a/b.arrows", "position": 96}
FACTS = LOCATION | {"errno": 5, "operation": "write", "pid": 7, "reason": "torn", "other": (1, 2)}


def assert_for_all(check):
    """Fail with the findings of a check of every kind of error."""
    findings = [f"{kind.__name__}: {finding}" for kind in KINDS if (finding := check(kind))]
    assert not findings, "\n" + "\n".join(findings)


def difference(actual, expected):
    """Describe the difference of two values; None if they are equal."""
    return None if actual == expected else f"{actual!r}, not {expected!r}"


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_survives_pickling_with_all_its_facts(copied):
    """Spark workers pickle their errors."""

    def everything(error):
        message = type(error), str(error), error.args, error.what, error.todo, error.facts
        return *message, {name: getattr(error, name) for name in FACTS}

    def check(kind):
        error = kind("it broke", todo="Mend it.", **FACTS)
        copied_error = everything(copied(error))
        expected = (kind, str(error), error.args, "it broke", "Mend it.", FACTS, FACTS)
        return difference(copied_error, expected)

    assert_for_all(check)


def test_an_error_has_a_call_for_programs_and_a_command_for_the_shell():
    """Also after pickling, and in an error that was made of another one."""
    change = alter_topic("t", {"retention.ms": 5, "cleanup.policy": None})
    todo = "It is too short." + Hint(f"Call {change}.", f"Run `{change.shell}`.")
    error = pickle.loads(pickle.dumps(errors.InvalidConfigError("it broke", todo=todo)))
    again = errors.InvalidConfigError("it broke", todo=error.todo + "Then try again.")

    call = "Call log.alter_topic('t', {'retention.ms': 5, 'cleanup.policy': None})."
    assert str(error) == f"it broke. It is too short. {call}"
    assert str(again) == f"{error} Then try again."
    command = "Run `embedlog topics alter t -c retention.ms=5 --reset cleanup.policy`."
    assert for_shell(again.todo) == f"It is too short. {command} Then try again."
    assert for_shell("Try again.") == "Try again."


def test_an_error_shows_what_where_and_what_to_do():
    """The message is enough to locate the problem."""
    expected = "it broke [flights-3, offset 42, a/b.arrows, byte 96]. Mend it."

    assert_for_all(
        lambda kind: difference(str(kind("it broke", todo="Mend it.", **LOCATION)), expected)
    )


def test_unknown_facts_are_left_out():
    """None is omitted, zero is not."""

    def check(kind):
        shown = (
            str(kind("it broke")),
            str(kind("it broke", topic="flights")),
            str(kind("it broke", topic="t", partition=0, offset=0)),
            kind("it broke").offset,
        )
        return difference(
            shown, ("it broke", "it broke [flights]", "it broke [t-0, offset 0]", None)
        )

    assert_for_all(check)


def test_an_error_has_a_docstring_and_says_whether_it_is_retriable():
    """Every error has `.retriable` and a docstring of its own."""

    def check(kind):
        inherited = (
            kind.__doc__ == errors.EmbedlogError.__doc__ and kind is not errors.EmbedlogError
        )
        if not kind.__doc__ or inherited:
            return "has no docstring of its own"
        return None if isinstance(kind.retriable, bool) else f"retriable is {kind.retriable!r}"

    assert_for_all(check)


def test_the_name_of_an_error_ends_in_error():
    """So do kafka-python's names."""
    assert_for_all(lambda kind: None if kind.__name__.endswith("Error") else "ends otherwise")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidConfigError, ValueError),
        (errors.SerializationError, TypeError),
        (errors.UnknownTopicOrPartitionError, LookupError),
        (errors.TimeoutError, TimeoutError),
        (errors.LockTimeoutError, TimeoutError),
    ],
)
def test_a_mistake_can_be_caught_as_a_builtin_error(kind, builtin):
    """Programs need not know the names of embedlog for it."""
    with pytest.raises(builtin):
        raise kind("it broke")
