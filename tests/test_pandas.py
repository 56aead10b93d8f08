"""embedlog imports pandas only for a caller that asks for a data frame."""

from support.children import run_python

# A separate process: this one may have imported pandas already.
WORK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name != "pandas", "pandas is imported"
sys.meta_path.insert(0, Refuse())

import embedlog
with embedlog.open(sys.argv[1]) as log:
    log.create_topic("t", 2)
    log.create_topic("keyed", 2, {"cleanup.policy": "compact", "segment.bytes": 1 << 20})
    log.create_topic("stamped", 1, {"message.timestamp.type": "LogAppendTime"})
    with log.producer() as producer:
        producer.send("t", b"v", key=b"k", headers=[("name", b"h"), ("none", None)]).result(60)
        producer.send("stamped", b"v", key=b"k").result(60)
        for topic in ("t", "keyed"):
            producer.send_batch(topic, [b"v"] * 100, keys=[b"%d" % (n % 7) for n in range(100)])
        producer.flush()
        producer.append_table("t", log.topic("t").to_arrow(["key", "value"]))
        producer.append_table("t", log.topic("t").to_arrow(["key", "value"]), partition=0)
    with log.consumer("t", "stamped", group_id="g", auto_offset_reset="earliest") as consumer:
        assert consumer.poll_batches(1000)
        consumer.seek_to_beginning()
        assert consumer.poll(1000)
        consumer.commit()
        partition = embedlog.TopicPartition("t", 0)
        assert consumer.offsets_for_times({partition: 5})[partition]
    for name in ("t", "keyed", "stamped"):
        topic = log.topic(name)
        assert len(topic.to_arrow()) == len(topic) and topic.head(3).to_arrow() and topic[-2:]
        assert repr(topic) and topic._repr_html_()
    log.housekeeping.compact("keyed")
    topic = log.topic("keyed")
    assert topic.get(b"3") == b"v" and len(topic.to_arrow(latest=True)) == 7
    assert log.housekeeping.verify() == []
    log.housekeeping.rebuild_index()

from embedlog.spark.input_partitions import plan_batch
from embedlog.spark.columns import SPARK_TYPES
from embedlog.spark.partition_reader import read_input_partition
from embedlog.spark.options import SourceOptions
topics = {"subscribe": "t,keyed,stamped", "includeHeaders": "true"}
options = SourceOptions.parse({"path": sys.argv[1], **topics})
names = tuple(SPARK_TYPES)
partitions = plan_batch(options)
batches = [rows for part in partitions for rows in read_input_partition(part, names, True)]
assert {rows.num_rows for rows in batches}
print("done")
"""


def test_no_work_on_the_log_imports_pandas(tmp_path):
    """The import takes 300 ms, in the first call or in each of Spark's workers."""
    assert run_python("-c", WORK, tmp_path / "log") == "done\n"
