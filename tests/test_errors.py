"""Errors say what happened, where and what to do, and arrive whole from a Spark worker."""

import copy
import inspect
import pickle

import pytest

from embedlog import errors

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.EmbedlogError)
]
PLACE = {"topic": "flights", "partition": 3, "offset": 42, "path": "a/b.arrows", "position": 96}
FACTS = PLACE | {"errno": 5, "operation": "write", "pid": 7, "reason": "torn", "other": (1, 2)}

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@each_kind
@pytest.mark.parametrize("remake", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_survives_pickling_with_all_its_facts(kind, remake):
    """A Spark worker sends its errors home."""
    error = kind("it broke", todo="Mend it.", **FACTS)

    again = remake(error)

    assert type(again) is kind
    assert (str(again), again.args) == (str(error), error.args)
    assert (again.what, again.todo, again.facts) == ("it broke", "Mend it.", FACTS)
    assert {name: getattr(again, name) for name in FACTS} == FACTS


@each_kind
def test_an_error_shows_what_where_and_what_to_do(kind):
    """Nobody should need a debugger to find the place."""
    error = kind("it broke", todo="Mend it.", **PLACE)

    assert str(error) == "it broke [flights-3, offset 42, a/b.arrows, byte 96]. Mend it."


@each_kind
def test_unknown_facts_are_left_out(kind):
    """None is no place; zero is one."""
    assert str(kind("it broke")) == "it broke"
    assert str(kind("it broke", topic="flights")) == "it broke [flights]"
    assert str(kind("it broke", topic="t", partition=0, offset=0)) == "it broke [t-0, offset 0]"
    assert kind("it broke").offset is None


@each_kind
def test_an_error_says_whether_to_try_again_and_what_it_means(kind):
    """Every error has `.retriable`; every one is explained."""
    assert isinstance(kind.retriable, bool)
    assert kind.__doc__
    assert kind.__doc__ != errors.EmbedlogError.__doc__ or kind is errors.EmbedlogError


@each_kind
def test_an_error_is_named_as_one(kind):
    """The names are kafka-python's, which end so."""
    assert kind.__name__.endswith("Error")


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
def test_who_does_not_know_embedlog_can_catch_the_builtin(kind, builtin):
    """A mistake that Python has a name for is caught by that name too."""
    with pytest.raises(builtin):
        raise kind("it broke")
