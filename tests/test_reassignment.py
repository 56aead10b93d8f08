"""Plans that make an assignment even again, compared with all possible plans."""

from collections import Counter
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from embedlog.replication.placement import assign_replicas, lead_evenly, reassign, resize


def no_racks(*directories):
    """Return directories without racks."""
    return dict.fromkeys(directories)


def after(current, directories):
    """Return the assignment after the plan."""
    return {**current, **reassign(current, directories)}


def counts(assignment, directories, rank=slice(None)):
    """Return how many replicas each directory has, or how many of some rank."""
    found = Counter(each for replicas in assignment.values() for each in replicas[rank])
    assert found.keys() <= directories.keys()
    return [found[each] for each in directories]


def count_moves(current, plan):
    """Return how many replicas a plan copies to another directory."""
    return sum(len(set(replicas) - set(current[each])) for each, replicas in plan.items())


def quality(current, new, directories):
    """Return what a plan minimizes: the racks that are missing, the loads squared, the moves."""
    racks = sum(len({directories[each] for each in replicas}) for replicas in new.values())
    loads = counts(new, directories)
    return -racks, sum(load * load for load in loads), count_moves(current, new)


def leader_quality(before, new):
    """Return what the choice of leaders minimizes: the loads squared, then the changes."""
    loads = Counter(replicas[0] for replicas in new.values())
    changed = sum(new[each][0] != before[each][0] for each in new)
    return sum(load * load for load in loads.values()), changed


def test_an_even_assignment_has_no_plan():
    """As many on each directory as possible, in its racks, with its leaders."""
    directories = {0: "a", 1: "b", 2: "a", 3: "b"}
    assert reassign(assign_replicas(16, 2, directories), directories) == {}
    assert reassign({}, directories) == {}


def test_a_directory_that_is_added_gets_its_share_and_nothing_else_moves():
    """12 replicas on 3 directories; the fourth gets 3 of them."""
    current = assign_replicas(6, 2, no_racks(0, 1, 2))
    new = after(current, no_racks(0, 1, 2, 3))

    assert count_moves(current, new) == 3
    assert counts(new, no_racks(0, 1, 2, 3)) == [3, 3, 3, 3]
    assert sorted(counts(new, no_racks(0, 1, 2, 3), slice(1))) == [1, 1, 2, 2]


def test_partitions_get_into_all_racks_once_directories_have_labels():
    """Racks come before evenness, and evenness before moves."""
    current = {n: (0, 1) if n % 2 else (2, 3) for n in range(8)}
    directories = {0: "a", 1: "a", 2: "b", 3: "b"}
    new = after(current, directories)

    assert all({directories[each] for each in pair} == {"a", "b"} for pair in new.values())
    assert counts(new, directories) == [4, 4, 4, 4]
    assert count_moves(current, new) == 8


def test_a_rack_with_one_directory_gets_a_replica_of_each_partition():
    """As in Kafka, although that is uneven."""
    current = dict.fromkeys(range(4), (0, 1))
    directories = {0: "a", 1: "a", 2: "b"}

    assert counts(after(current, directories), directories) == [2, 2, 4]


def test_preferred_leaders_become_even_without_copies():
    """Only the order of the replicas changes, and of no more partitions than necessary."""
    current = dict.fromkeys(range(6), (0, 1, 2))
    plan = reassign(current, no_racks(0, 1, 2))

    assert len(plan) == 4
    assert count_moves(current, plan) == 0
    assert counts({**current, **plan}, no_racks(0, 1, 2), slice(1)) == [2, 2, 2]


@given(st.data())
def test_no_plan_is_better(data):
    """For all small assignments, racks, and directories that are added."""
    racks = st.sampled_from([None, "a", "b"])
    directories = data.draw(st.dictionaries(st.integers(0, 6), racks, min_size=1, max_size=4))
    most = min(3, len(directories))
    replicas = st.lists(
        st.sampled_from([*directories]), min_size=1, max_size=most, unique=True
    ).map(tuple)
    current = dict(enumerate(data.draw(st.lists(replicas, min_size=1, max_size=4))))

    new = after(current, directories)

    assert reassign(new, directories) == {}
    assert all(len(set(new[each])) == len(current[each]) for each in current)
    choices = [list(combinations(directories, len(each))) for each in current.values()]
    plans = (dict(zip(current, chosen, strict=True)) for chosen in product(*choices))
    best = min(quality(current, plan, directories) for plan in plans)
    assert quality(current, new, directories) == best
    leaders = product(*new.values())
    options = ({each: (one,) for each, one in zip(new, chosen, strict=True)} for chosen in leaders)
    best_leaders = min(sum(n * n for n in Counter(o.values()).values()) for o in options)
    assert leader_quality(current, new)[0] == best_leaders


@given(st.data())
def test_a_plan_for_many_partitions_is_even_and_final(data):
    """Without racks within 1, and no more moves than the directories have too many."""
    before = data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=7))
    factor = data.draw(st.integers(1, min(3, len(before))))
    left = before | data.draw(st.sets(st.integers(0, 9), max_size=4))
    current = assign_replicas(data.draw(st.integers(1, 60)), factor, no_racks(*before))

    new = after(current, no_racks(*left))

    loads, leaders = counts(new, no_racks(*left)), counts(new, no_racks(*left), slice(1))
    assert max(loads) - min(loads) <= 1
    assert max(leaders) - min(leaders) <= 1
    assert reassign(new, no_racks(*left)) == {}
    old = Counter(each for replicas in current.values() for each in replicas)
    most = -(-len(current) * factor // len(left))
    at_least = sum(max(0, old[each] - most) for each in left)
    assert at_least <= count_moves(current, new) <= 2 * at_least + len(left)


@given(st.randoms(use_true_random=False))
def test_more_or_fewer_replicas_keep_what_they_can(rng):
    """The first ones stay in their order; new ones are in as many racks as possible, and even."""
    directories = {each: rng.choice("abc") for each in range(1, rng.randint(2, 7))}
    count, factor = rng.randint(1, 9), rng.randint(1, len(directories))
    before = assign_replicas(count, rng.randint(1, len(directories)), directories, rng=rng)
    chosen = {each: factor for each in before if rng.random() < 0.7}
    for each, replicas in resize(before, chosen, directories).items():
        wanted = chosen.get(each, len(before[each]))
        kept = min(wanted, len(before[each]))
        assert len(set(replicas)) == len(replicas) == wanted
        assert replicas[:kept] == tuple(before[each][:kept])
        racks = {directories[replica] for replica in replicas}
        new = wanted - kept
        old_racks = {directories[replica] for replica in replicas[:kept]}
        assert len(racks) == min(len(old_racks) + new, len(set(directories.values())))


def test_new_replicas_are_where_the_fewest_are():
    """Without racks the loads are even."""
    before = dict.fromkeys(range(6), (1,))
    resized = resize(before, dict.fromkeys(before, 2), no_racks(1, 2, 3, 4))
    assert counts(resized, no_racks(1, 2, 3, 4)) == [6, 2, 2, 2]


def test_leaders_become_even_by_changes_of_the_partitions_that_may_change():
    """The others count, and keep their leaders; no replica moves."""
    current = {"a": (1, 2), "b": (1, 2), "c": (1, 3), "d": (1, 3)}
    even = lead_evenly(current, dict.fromkeys([1, 2, 3]), movable={"c", "d"})

    assert (even["a"], even["b"]) == ((1, 2), (1, 2))
    assert {even["c"], even["d"]} <= {(1, 3), (3, 1)}
    assert [replicas[0] for replicas in even.values()].count(1) == 2
    assert lead_evenly(even, dict.fromkeys([1, 2, 3]), movable=()) == even
