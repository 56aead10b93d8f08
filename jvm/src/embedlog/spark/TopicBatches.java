package embedlog.spark;

import java.util.Arrays;

/** The rows of one topic in a task: finds their partitions, and collects them in batches. */
final class TopicBatches {
  private static final int BATCH_BYTES = 1 << 20;

  /** An upper bound for what a batch takes besides its records. */
  private static final int BATCH_OVERHEAD_BYTES = 8 << 10;

  private final TargetTopic topic;
  private final StagedFileWriter file;
  private final KeylessPartitions keyless;
  private final BatchEncoder encoder;
  private final long limit;
  private OpenBatch[] batches = {};
  private int keylessPartition;
  private int keylessTurn = -1;
  private boolean placedByKey;

  TopicBatches(
      TargetTopic topic, BatchEncoder encoder, StagedFileWriter file, KeylessPartitions keyless) {
    this.topic = topic;
    this.file = file;
    this.keyless = keyless;
    this.encoder = encoder;
    long smallest = Math.min(BATCH_BYTES, Math.min(topic.messageLimit(), topic.segmentLimit()));
    limit = Math.max(smallest - BATCH_OVERHEAD_BYTES, 1);
  }

  /**
   * Adds a row to the open batch of its partition, which is written first if it is full.
   *
   * @return how much more memory the open batches take
   * @throws EmbedlogException if the topic cannot have the row
   */
  int add(SinkRow row) {
    int partition = partition(row);
    OpenBatch batch = batch(partition);
    int before = batch == null ? 0 : batch.capacity();
    if (batch == null) {
      batch = batches[partition] = new OpenBatch();
    } else if (!batch.hasRoomFor(row, limit)) {
      write(partition, batch);
      batch.clear();
    }
    BatchEncoder.checkSize((long) row.key().length() + row.value().length());
    batch.add(row);
    return batch.capacity() - before;
  }

  private OpenBatch batch(int partition) {
    if (partition >= batches.length) {
      batches = Arrays.copyOf(batches, Math.max(partition + 1, 2 * batches.length));
    }
    return batches[partition];
  }

  private int partition(SinkRow row) {
    if (keylessTurn != keyless.turn()) {
      keylessTurn = keyless.turn();
      keylessPartition = topic.partitions() == 1 ? 0 : keyless.next() % topic.partitions();
    }
    if (row.hasPartition()) {
      topic.checkPartition(row.partition());
      return row.partition();
    }
    if (row.key().isNull()) {
      return keylessPartition;
    }
    placedByKey |= topic.isNew();
    return topic.partitions() == 1 ? 0 : row.key().partition(topic.partitions());
  }

  /** Writes all open batches, and frees their memory. */
  void flush() {
    for (int partition = 0; partition < batches.length; partition++) {
      if (batches[partition] != null) {
        write(partition, batches[partition]);
        batches[partition] = null;
      }
    }
  }

  private void write(int partition, OpenBatch batch) {
    encoder.encode(
        topic,
        batch,
        (head, body, headers, count) -> file.add(topic, partition, head, body, headers, count));
  }

  /** Whether a row of a new topic has a key and no partition. */
  boolean isPlacedByKey() {
    return placedByKey;
  }
}
