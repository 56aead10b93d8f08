package embedlog.spark;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.stream.Stream;
import org.apache.spark.sql.connector.write.WriterCommitMessage;

/**
 * What one task staged: its message to the driver, which passes it to the planner.
 *
 * @param task the number of the task
 * @param path the file, in the log's directory; empty if the task had no rows
 * @param partitions the partitions that its batches are for
 * @param batches where its batches are
 * @param records how many records they have
 * @param placedByKey whether rows of a new topic are in partition 0 because that is the partition
 *     of any key if there is only one
 */
record StagedRows(
    int task,
    String path,
    List<Partition> partitions,
    List<Batch> batches,
    long records,
    boolean placedByKey)
    implements WriterCommitMessage {

  /** A partition of a topic. */
  record Partition(String topic, long topicId, int number) implements java.io.Serializable {}

  /** A batch in the file, and the index of its partition. */
  record Batch(int partition, long position, int size, boolean headers)
      implements java.io.Serializable {}

  /**
   * Returns the messages for the planner, in the order of the tasks, which a repetition has too.
   */
  static List<Map<String, Object>> toJson(WriterCommitMessage[] messages) {
    // Spark passes null for a task that did not commit.
    return Stream.of(messages)
        .filter(Objects::nonNull)
        .map(StagedRows.class::cast)
        .sorted(Comparator.comparingInt(StagedRows::task))
        .map(StagedRows::toJson)
        .toList();
  }

  private Map<String, Object> toJson() {
    List<List<Object>> partitionList = new ArrayList<>(partitions.size());
    for (Partition partition : partitions) {
      partitionList.add(List.of(partition.topic, partition.topicId, partition.number));
    }
    List<List<Object>> batchList = new ArrayList<>(batches.size());
    for (Batch batch : batches) {
      batchList.add(List.of(batch.partition, batch.position, batch.size, batch.headers));
    }
    return Map.of(
        "path", path,
        "partitions", partitionList,
        "batches", batchList,
        "records", records,
        "placed_by_key", placedByKey);
  }
}
