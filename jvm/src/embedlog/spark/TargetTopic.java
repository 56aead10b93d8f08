package embedlog.spark;

import java.io.Serializable;

/**
 * A topic as the tasks of a write need to know it.
 *
 * @param name its name
 * @param id its id, by which a topic differs from a deleted one of the same name
 * @param partitions how many partitions it has
 * @param messageLimit its {@code max.message.bytes}
 * @param segmentLimit its {@code segment.bytes}
 * @param compression "none", "lz4" or "zstd"
 */
record TargetTopic(
    String name, long id, int partitions, long messageLimit, long segmentLimit, String compression)
    implements Serializable {
  /** The most partitions of a topic. */
  static final int MAX_PARTITIONS = 20_000;

  private static final long NEW_TOPIC_ID = -1;

  /** Whether it will be created, with as many partitions as the rows need, by the publication. */
  boolean isNew() {
    return id == NEW_TOPIC_ID;
  }

  /**
   * Checks a partition that a row names.
   *
   * @throws EmbedlogException if the topic does not have it
   */
  void checkPartition(int partition) {
    int count = isNew() ? MAX_PARTITIONS : partitions;
    if (partition >= 0 && partition < count) {
      return;
    }
    String problem =
        isNew()
            ? "A topic has at most " + count + " partitions, from 0"
            : "The topic has partitions 0 to " + (count - 1);
    throw new EmbedlogException(
        "UnknownTopicOrPartitionError",
        String.format(
            "%s [%s-%d]. Correct the column 'partition' or leave it out, or add partitions.",
            problem, name, partition));
  }
}
