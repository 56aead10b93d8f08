"""A program for confluent_kafka that prints the same on a log and on a broker.

Run with the address as BOOTSTRAP and the import as CLIENT (confluent_kafka, or embedlog's); PARTS
are names of functions, by default all.
"""

# ruff: noqa: T201 - it prints what is compared

import importlib
import os
import time

module = os.environ.get("CLIENT", "embedlog.kafka.confluent")
client = importlib.import_module(module)
admin_module = importlib.import_module(f"{module}.admin")

ADDRESS = {"bootstrap.servers": os.environ["BOOTSTRAP"]}
TOPIC, COMPACTED = "flights", "planes"
SECONDS = float(os.environ.get("SECONDS", "30"))
BROKERS = ":" in ADDRESS["bootstrap.servers"] and "://" not in ADDRESS["bootstrap.servers"]
QUIET = 2.0 if BROKERS else 0.2
"""How long nothing must come: a log needs no requests."""
KafkaError, TopicPartition = client.KafkaError, client.TopicPartition


def shown(partitions):
    return sorted((p.topic, p.partition, p.offset, p.error and p.error.name()) for p in partitions)


def outcome(call, *arguments, **named):
    try:
        return call(*arguments, **named)
    except client.KafkaException as error:
        return error.args[0].name()
    except Exception as error:  # noqa: BLE001 - its name is compared
        return type(error).__name__


def let_brokers_agree():
    """Wait until the brokers of a cluster have told each other; a log knows at once."""
    if BROKERS:
        time.sleep(0.5)


def create(admin):
    topics = [
        admin_module.NewTopic(TOPIC, num_partitions=3, replication_factor=1),
        # The broker of the tests has another `retention.ms` than Kafka, for records of the past.
        admin_module.NewTopic(
            COMPACTED, 1, 1, config={"cleanup.policy": "compact", "retention.ms": "604800000"}
        ),
    ]
    for name, future in sorted(admin.create_topics(topics).items()):
        print("created", name, future.result())
    let_brokers_agree()
    for name, future in admin.create_topics(topics[:1]).items():
        print("created again", name, outcome(future.result))
    for name, future in admin.delete_topics(["nothing"]).items():
        print("deleted", name, outcome(future.result))


def produce():
    reports = []
    producer = client.Producer(
        {**ADDRESS, "linger.ms": 5, "compression.type": "gzip", "client.id": "program"}
    )

    def delivered(error, message):
        reports.append((message.key(), error, message.topic(), message.partition()))

    for number in range(100):
        producer.produce(
            TOPIC,
            f"flight {number}",
            key=f"carrier-{number % 7}",
            headers={"number": str(number)},
            timestamp=1_700_000_000_000 + number,
            on_delivery=delivered,
        )
        producer.poll(0)
    producer.produce(TOPIC, b"chosen", partition=2, callback=delivered)
    producer.produce(TOPIC, value=None, key="tombstone", callback=delivered)
    print("left", producer.flush(SECONDS), len(producer))
    print("reports", len(reports), sorted(set(reports), key=repr))
    print("too large", outcome(producer.produce, TOPIC, bytes(2_000_000)))
    print("not bytes", outcome(producer.produce, TOPIC, 5))
    producer.produce(COMPACTED, "without a key", callback=delivered)
    print("no partition", outcome(producer.produce, TOPIC, "nowhere", partition=9))
    producer.flush(SECONDS)
    print("refused", reports[-1][1] and reports[-1][1].name())


def consumer_of(group, **settings):
    return client.Consumer(
        {
            **ADDRESS,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": 6000,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )


def consume_all(consumer):
    """Return the records until the end of each of the three partitions."""
    records, ends, deadline = [], {}, time.monotonic() + SECONDS
    while len(ends) < 3 and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            ends[message.partition()] = message.offset()
        else:
            records.append(message)
    print("ends", sorted(ends.items()))
    return records


def consume():
    def assigned(consumer, partitions):
        print("assigned", shown(partitions))

    def revoked(consumer, partitions):
        print("revoked", [(p.topic, p.partition) for p in sorted(partitions)])

    consumer = consumer_of("first", enable_partition_eof=True, enable_auto_commit=False)
    consumer.subscribe([TOPIC], on_assign=assigned, on_revoke=revoked)
    for message in sorted(consume_all(consumer), key=lambda m: (m.partition(), m.offset())):
        time_type, milliseconds = message.timestamp()
        moment = milliseconds if message.headers() else "now"
        print(
            *(message.partition(), message.offset(), message.key(), message.value()),
            *(message.headers(), time_type, moment),
            *(len(message), message.error(), message.topic()),
        )
    partitions = [TopicPartition(TOPIC, number) for number in range(3)]
    print("position", shown(consumer.position(partitions)))
    print("committed", shown(consumer.committed(partitions, timeout=SECONDS)))
    print("commit", shown(consumer.commit(asynchronous=False)))
    print("commit again", outcome(consumer.commit, asynchronous=False))
    print("committed", shown(consumer.committed(partitions, timeout=SECONDS)))
    watermarks = [consumer.get_watermark_offsets(p, timeout=SECONDS) for p in partitions]
    print("watermarks", watermarks)
    times = [TopicPartition(TOPIC, number, 1_700_000_000_050) for number in range(3)]
    print("times", shown(consumer.offsets_for_times(times, timeout=SECONDS)))
    print("assignment", [(p.topic, p.partition) for p in sorted(consumer.assignment())])
    consumer.close()
    print("closed", outcome(consumer.poll, 0))


def consume_on_assignment():
    consumer = consumer_of("second", enable_auto_offset_store=False)
    print("seek", outcome(consumer.seek, TopicPartition(TOPIC, 1, 1)))
    consumer.assign([TopicPartition(TOPIC, 1, 2), TopicPartition(TOPIC, 2, client.OFFSET_END)])
    first = consumer.poll(SECONDS)
    print("first", first.partition(), first.offset(), first.value())
    print("commit", outcome(consumer.commit, asynchronous=False))
    consumer.store_offsets(first)
    print("commit", shown(consumer.commit(asynchronous=False)))
    consumer.seek(TopicPartition(TOPIC, 1, 0))
    batch = consumer.consume(3, timeout=SECONDS)
    print("batch", [(message.partition(), message.offset()) for message in batch])
    print("incremental", outcome(consumer.incremental_assign, [TopicPartition(TOPIC, 1)]))
    print("incremental", outcome(consumer.incremental_unassign, [TopicPartition(TOPIC, 0)]))
    consumer.incremental_unassign([TopicPartition(TOPIC, 1)])
    print("assignment", [(p.topic, p.partition) for p in consumer.assignment()])
    consumer.unassign()
    print("nothing", consumer.poll(0))
    consumer.close()


def taken(consumer, count, seconds=SECONDS):
    """Return what so many messages are: an offset, or the name of an error."""
    messages, deadline = [], time.monotonic() + seconds
    while len(messages) < count and time.monotonic() < deadline:
        message = consumer.poll(0.1)
        if message is not None:
            error = message.error()
            messages.append((message.partition(), error.name() if error else message.offset()))
    return messages


def assign_again():
    """Partitions that are assigned already, paused, or without a position."""
    one, two = TopicPartition(TOPIC, 1), TopicPartition(TOPIC, 2)
    consumer = consumer_of("again", enable_auto_commit=False)
    for commit in (None, 1):
        # Before the assignment: librdkafka may look the offset up before or after a commit.
        if commit is not None:
            consumer.commit(offsets=[TopicPartition(TOPIC, 1, commit)], asynchronous=False)
        consumer.assign([one])
        print("read", taken(consumer, 3))
        for offset in (client.OFFSET_INVALID, client.OFFSET_STORED, 2):
            consumer.assign([TopicPartition(TOPIC, 1, offset)])
            print("again", taken(consumer, 2))
    print("nowhere", outcome(consumer.seek, TopicPartition(TOPIC, 1, client.OFFSET_STORED)))
    consumer.seek(one)
    print("by reset", taken(consumer, 1))
    consumer.pause([one])
    consumer.assign([one])
    print("paused", taken(consumer, 1, QUIET))
    consumer.unassign()
    consumer.assign([one, TopicPartition(TOPIC, 2, 0)])
    print("paused", taken(consumer, 1))
    consumer.resume([one])
    consumer.incremental_unassign([two])
    print("resumed", taken(consumer, 1))
    print("wrong", outcome(consumer.incremental_assign, [TopicPartition(TOPIC, 2, -5)]))
    consumer.close()
    consumer = consumer_of("lost", auto_offset_reset="error", enable_auto_commit=False)
    consumer.assign([one])
    print("no position", taken(consumer, 2, QUIET))
    print("seek", outcome(consumer.seek, TopicPartition(TOPIC, 1, 1)))
    consumer.assign([TopicPartition(TOPIC, 1, 999)])
    print("out of range", taken(consumer, 2, QUIET))
    consumer.assign([TopicPartition(TOPIC, 1, 1)])
    print("back", taken(consumer, 1))
    for time_ms in (-1, -2, -5, 1_700_000_000_050):
        times = [TopicPartition(TOPIC, 1, time_ms)]
        found = outcome(consumer.offsets_for_times, times, timeout=SECONDS)
        print("time", found if isinstance(found, str) else shown(found))
    unknown = TopicPartition(TOPIC, 9, 5)
    print("time", shown(consumer.offsets_for_times([TopicPartition(TOPIC, 1, 5), unknown])))
    for partitions in ([unknown], []):
        print("time", outcome(consumer.offsets_for_times, partitions))
    for pattern in ("^[", "^(", "^*"):
        print("pattern", outcome(consumer.subscribe, [TOPIC, pattern]))
    consumer.close()


def share():
    """Pause, and have another member take a part of the partitions, more than once."""
    settings = {"enable_auto_commit": False, "heartbeat_interval_ms": 300}
    for strategy in ("range", "cooperative-sticky"):
        settings["partition_assignment_strategy"] = strategy
        first = consumer_of(f"shared by {strategy}", **settings)
        first.subscribe([TOPIC])
        while len(first.assignment()) < 3:
            first.poll(0.1)
        first.pause(first.assignment())
        got = []
        for _ in range(2):
            second = consumer_of(f"shared by {strategy}", **settings)
            second.subscribe([TOPIC])
            while not second.assignment() or len(first.assignment()) == 3:
                got += [first.poll(0.1)]
                second.poll(0.1)
            second.close()
            while len(first.assignment()) < 3:
                got += [first.poll(0.1)]
        got += first.consume(1, QUIET)
        print("shared", strategy, [message for message in got if message is not None])
        first.resume(first.assignment())
        print("resumed", len(taken(first, 1)))
        first.close()


def poll_too_rarely():
    """A pause that is longer than the group allows."""
    lost = []
    # Brokers refuse less.
    longest = 6000 if BROKERS else 300
    limits = {"max_poll_interval_ms": longest, "session_timeout_ms": longest}
    limits |= {"heartbeat_interval_ms": longest // 20}
    consumer = consumer_of("slow", enable_auto_commit=False, **limits)
    consumer.subscribe([TOPIC], on_lost=lambda _, partitions: lost.append(len(partitions)))
    first = taken(consumer, 102)
    time.sleep(longest * 1.5e-3)
    message = consumer.poll(SECONDS)
    print("rarely", message.error().name(), sorted(taken(consumer, 102)) == sorted(first), lost)
    consumer.close()


def consume_in_two_sessions():
    """Whoever comes next continues after what was stored."""
    for session in range(2):
        consumer = consumer_of("third", auto_commit_interval_ms=100_000)
        consumer.subscribe(["^fli.*", "other"])
        messages, deadline = [], time.monotonic() + SECONDS
        while len(messages) < 20 and time.monotonic() < deadline:
            messages += [m for m in consumer.consume(20 - len(messages), 0.5) if not m.error()]
        consumer.close()
        print("session", session, len(messages))
        partitions = [TopicPartition(TOPIC, number) for number in range(3)]
        other = consumer_of("third")
        committed = other.committed(partitions, timeout=SECONDS)
        print("stored", sum(max(partition.offset, 0) for partition in committed))
        other.close()


def administer(admin):
    topics = admin.list_topics(timeout=SECONDS).topics
    print(
        "topics",
        [(name, len(topics[name].partitions)) for name in sorted(topics) if name[0] != "_"],
    )
    grown = admin.create_partitions([admin_module.NewPartitions(COMPACTED, 2)])
    print("grown", {name: future.result() for name, future in grown.items()})
    resource = admin_module.ConfigResource("topic", COMPACTED)
    settings = admin.describe_configs([resource])[resource].result()
    print("config", [settings[name].value for name in ("cleanup.policy", "retention.ms")])
    entry, operation = admin_module.ConfigEntry, admin_module.AlterConfigOpType
    resource.add_incremental_config(
        entry("retention.ms", "1000", incremental_operation=operation.SET)
    )
    resource.add_incremental_config(
        entry("cleanup.policy", "delete", incremental_operation=operation.APPEND)
    )
    print("altered", admin.incremental_alter_configs([resource])[resource].result())
    let_brokers_agree()
    settings = admin.describe_configs([resource])[resource].result()
    print("config", [settings[name].value for name in ("cleanup.policy", "retention.ms")])
    partition = TopicPartition(TOPIC, 1)
    specs = admin_module.OffsetSpec
    for spec in (specs.earliest(), specs.latest(), specs.for_timestamp(1_700_000_000_050)):
        result = admin.list_offsets({partition: spec})[partition].result()
        print("offset", result.offset, result.timestamp)
    deleted = admin.delete_records([TopicPartition(TOPIC, 1, 4)])
    print("deleted", [future.result().low_watermark for future in deleted.values()])
    groups = admin.list_consumer_groups().result().valid
    print(
        "groups",
        [(group.group_id, group.state.name) for group in sorted(groups, key=lambda g: g.group_id)],
    )
    described = admin.describe_consumer_groups(["first"])["first"].result()
    print("group", described.group_id, described.state.name, described.members)
    request = client.ConsumerGroupTopicPartitions("first", [TopicPartition(TOPIC, 1, 7)])
    changed = admin.alter_consumer_group_offsets([request])["first"].result()
    print("changed", shown(changed.topic_partitions))
    partitions = [TopicPartition(TOPIC, 1, 7, "note", 0), TopicPartition(TOPIC, 9, 1)]
    request = client.ConsumerGroupTopicPartitions("first", partitions)
    changed = admin.alter_consumer_group_offsets([request])["first"].result()
    print("changed", shown(changed.topic_partitions))
    for partition in partitions:
        where = TopicPartition(TOPIC, partition.partition)
        request = client.ConsumerGroupTopicPartitions("first", [where])
        [row] = admin.list_consumer_group_offsets([request])["first"].result().topic_partitions
        print("listed", shown([row]), row.metadata, row.leader_epoch)
    gone = admin.delete_consumer_groups(["first", "unknown"])
    print("gone", {name: outcome(future.result) for name, future in sorted(gone.items())})
    described = admin.describe_topics(client.TopicCollection([TOPIC]))[TOPIC].result()
    print("topic", described.name, described.is_internal, len(described.partitions))
    print("nodes", len(admin.describe_cluster().result().nodes))
    for name, future in sorted(admin.delete_topics([TOPIC, COMPACTED]).items()):
        print("deleted", name, future.result())


def transform(admin):
    """Read, transform and write in transactions, with the offsets: committed, aborted, fenced."""
    for name in ("inputs", "outputs"):
        admin.create_topics([admin_module.NewTopic(name, 1, 1)])[name].result()
    let_brokers_agree()
    plain = client.Producer(ADDRESS)
    for number in range(12):
        plain.produce("inputs", f"{number}")
    plain.flush(SECONDS)
    settings = {**ADDRESS, "transactional.id": "transform"}
    producer, partition = client.Producer(settings), TopicPartition("inputs", 0)
    producer.init_transactions(SECONDS)
    consumer = consumer_of("transform", enable_auto_commit=False)
    for end in ("commit_transaction", "abort_transaction", "commit_transaction"):
        [committed] = consumer.committed([partition], timeout=SECONDS)
        consumer.assign([TopicPartition("inputs", 0, max(committed.offset, 0))])
        messages = consumer.consume(4, SECONDS)
        producer.begin_transaction()
        for message in messages:
            producer.produce("outputs", b"of " + message.value())
        positions = consumer.position([partition])
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        getattr(producer, end)()
        print(end, len(messages), shown(consumer.committed([partition], timeout=SECONDS)))
    consumer.close()
    # A member that was closed: its group has another generation, or none.
    member = consumer_of("members", enable_auto_commit=False)
    member.subscribe(["inputs"])
    read = member.consume(3, SECONDS)
    metadata, positions = member.consumer_group_metadata(), member.position([partition])
    producer.begin_transaction()
    producer.produce("outputs", f"{len(read)} by a member")
    producer.send_offsets_to_transaction(positions, metadata)
    producer.commit_transaction()
    print("member", shown(member.committed([partition], timeout=SECONDS)))
    member.close()
    producer.begin_transaction()
    producer.produce("outputs", "by a member that left")
    try:
        producer.send_offsets_to_transaction([TopicPartition("inputs", 0, 9)], metadata)
        producer.commit_transaction()
        print("committed")
    except client.KafkaException as error:
        print("left", error.args[0].txn_requires_abort(), error.args[0].fatal())
        producer.abort_transaction()
    newer = client.Producer(settings)
    producer.begin_transaction()
    producer.produce("outputs", "late")
    newer.init_transactions(SECONDS)
    print("fenced", outcome(producer.commit_transaction))
    newer.begin_transaction()
    newer.produce("outputs", "last")
    newer.commit_transaction()
    reader = consumer_of("reader", isolation_level="read_committed")
    reader.assign([TopicPartition("outputs", 0, 0)])
    values = []
    while not values or values[-1] != b"last":
        message = reader.poll(SECONDS)
        values.append(message.value())
    print("outputs", values)
    reader.close()
    print("members", shown(consumer_of("members").committed([partition], timeout=SECONDS)))
    for name in ("inputs", "outputs"):
        admin.delete_topics([name])[name].result()


def refuse(admin):
    """Print what is refused, and how."""

    def of(futures):
        return [outcome(future.result) for _, future in sorted(futures.items())]

    new, more = admin_module.NewTopic, admin_module.NewPartitions
    print("name", of(admin.create_topics([new("bad name", 1, 1)])))
    print("none", of(admin.create_topics([new("zero", 0, 1)])))
    print("setting", of(admin.create_topics([new("wrong", 1, 1, config={"no.such": "1"})])))
    print("value", of(admin.create_topics([new("wrong", 1, 1, config={"retention.ms": "x"})])))
    print("only checked", of(admin.create_topics([new("checked", 1, 1)], validate_only=True)))
    print("fewer", of(admin.create_partitions([more(TOPIC, 2)])))
    print("unknown", of(admin.create_partitions([more("nothing", 2)])))
    resource = admin_module.ConfigResource("topic", "nothing")
    print("config", of(admin.describe_configs([resource])))
    print("offsets", of(admin.list_offsets({TopicPartition("nothing", 0): LATEST()})))
    print("past the end", of(admin.delete_records([TopicPartition(TOPIC, 1, 1000)])))
    print("all", [f.result().low_watermark for f in admin.delete_records(ALL_OF_2).values()])
    print("topics", of(admin.describe_topics(client.TopicCollection(["nothing"]))))
    described = admin.describe_consumer_groups(["nobody"])["nobody"].result()
    print("group", described.state.name, described.members)
    request = client.ConsumerGroupTopicPartitions("nobody", [TopicPartition(TOPIC, 1)])
    print(
        "nobody",
        shown(admin.list_consumer_group_offsets([request])["nobody"].result().topic_partitions),
    )
    consumer = consumer_of("member")
    unknown = [TopicPartition("nothing", 0)]
    print("watermarks", outcome(consumer.get_watermark_offsets, unknown[0], timeout=SECONDS))
    print("committed", [part.offset for part in consumer.committed(unknown, timeout=SECONDS)])
    print("metadata", consumer.list_topics("nothing", SECONDS).topics["nothing"].error.name())
    consumer.subscribe(["nothing", TOPIC])
    print("missing", consumer.poll(SECONDS).error().name())
    while not consumer.assignment():
        consumer.poll(0.1)
    request = client.ConsumerGroupTopicPartitions("member", [TopicPartition(TOPIC, 1, 7)])
    altered = admin.alter_consumer_group_offsets([request])["member"].result()
    print("members", shown(altered.topic_partitions))
    print("members", of(admin.delete_consumer_groups(["member"])))
    member = admin.describe_consumer_groups(["member"])["member"].result().members[0]
    print(
        "member", len(member.assignment.topic_partitions), member.member_id == consumer.memberid()
    )
    outside = consumer_of("member")
    print(
        "outside",
        outcome(outside.commit, offsets=[TopicPartition(TOPIC, 1, 7)], asynchronous=False),
    )
    outside.close()
    consumer.close()


def transact(admin):
    """Commit a transaction, abort one, and call in the wrong order."""
    admin.create_topics([admin_module.NewTopic("bookings", 1, 1)])["bookings"].result()
    let_brokers_agree()
    reports = []

    def delivered(error, message):
        reports.append((message.value(), error and error.name()))

    def producer_of(name):
        return client.Producer({**ADDRESS, "transactional.id": name})

    producer = producer_of("booking")
    print("before init", outcome(producer.begin_transaction))
    print("init", producer.init_transactions(SECONDS))
    print("without begin", outcome(producer.commit_transaction, SECONDS))
    print("without begin", outcome(producer.produce, "bookings", "lost"))
    for end in (producer.commit_transaction, producer.abort_transaction):
        print("begin", producer.begin_transaction(), outcome(producer.begin_transaction))
        for number in range(4):
            value = f"{end.__name__} {number}"
            producer.produce("bookings", value, callback=delivered)
        print("flush", producer.flush(SECONDS), end(SECONDS), len(producer))
    print("reports", sorted(reports))
    producer.begin_transaction()
    producer.produce("bookings", "fenced")
    producer.flush(SECONDS)
    newer = producer_of("booking")
    newer.init_transactions(SECONDS)
    try:
        producer.commit_transaction(SECONDS)
    except client.KafkaException as error:
        print("fenced", error.args[0].name(), error.args[0].fatal())
    for call in (
        producer.abort_transaction,
        producer.begin_transaction,
        producer.init_transactions,
    ):
        print("fenced", outcome(call))
    print("fenced", outcome(producer.produce, "bookings", "never"))
    for settings in (
        *({"acks": 1}, {"acks": "all"}, {"retries": 0}, {"enable.idempotence": False}),
        *({"max.in.flight": 6}, {"message.timeout.ms": 70_000}, {"message.timeout.ms": 0}),
        {"message.timeout.ms": 70_000, "transaction.timeout.ms": 80_000},
    ):
        made = outcome(client.Producer, {**ADDRESS, "transactional.id": "other", **settings})
        print("settings", settings, made if isinstance(made, str) else "accepted")
    newer.begin_transaction()
    newer.produce("bookings", "last")
    newer.commit_transaction(SECONDS)
    consumer = consumer_of("transactions", isolation_level="read_committed")
    consumer.subscribe(["bookings"])
    values = []
    while b"last" not in values:
        message = consumer.poll(SECONDS)
        values.append(message.value())
    print("visible", values)
    consumer.close()
    admin.delete_topics(["bookings"])["bookings"].result()


LATEST = admin_module.OffsetSpec.latest
ALL_OF_2 = [TopicPartition(TOPIC, 2, client.OFFSET_END)]


PARTS = (
    *(create, produce, consume, consume_on_assignment, assign_again, share, poll_too_rarely),
    *(consume_in_two_sessions, refuse, transact, transform, administer),
)

if __name__ == "__main__":
    admin = admin_module.AdminClient(ADDRESS)
    chosen = os.environ.get("PARTS", "").split()
    for part in PARTS:
        if not chosen or part.__name__ in chosen:
            part(*([admin] if part.__code__.co_argcount else []))
