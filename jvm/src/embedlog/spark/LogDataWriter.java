package embedlog.spark;

import java.io.IOException;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Writes the rows of one task as finished batches to a staged file, which no reader sees yet.
 *
 * <p>It opens no database and takes no lock, so its process may be killed at any time, and run
 * twice.
 */
final class LogDataWriter implements DataWriter<InternalRow> {
  /** How much memory open batches may take before they are all written, full or not. */
  private static final long MAX_OPEN_BYTES = 32 << 20;

  private final WritePlan plan;
  private final int task;
  private final SinkRow row;
  private final StagedFileWriter file;
  private final BatchEncoder encoder = new BatchEncoder();
  private final KeylessPartitions keyless;
  private final Map<UTF8String, TopicBatches> topics = new HashMap<>();
  private UTF8String topicName;
  private TopicBatches topic;
  private long openBytes;

  /**
   * Makes the writer of one attempt of a task.
   *
   * @param plan what all tasks of the write need to know
   * @param schema the columns of the rows
   * @param task the number of the task
   * @param fileName the name of the staged file, which no other attempt has
   */
  LogDataWriter(WritePlan plan, StructType schema, int task, String fileName) {
    this.plan = plan;
    this.task = task;
    row = new SinkRow(schema);
    file = new StagedFileWriter(plan, fileName);
    keyless = new KeylessPartitions(task);
    if (plan.topic() != null) {
      topicName = UTF8String.fromString(plan.topic());
      topic = open(topicName);
    }
  }

  @Override
  public void write(InternalRow internalRow) {
    row.show(internalRow);
    if (plan.topic() == null) {
      findTopic();
    }
    openBytes += topic.add(row);
    keyless.count(row);
    if (openBytes > MAX_OPEN_BYTES) {
      flush();
    }
  }

  private void findTopic() {
    UTF8String name = row.topic();
    if (name == null) {
      throw new EmbedlogException(
          "InvalidRecordError",
          "Null topic present in the data. Use the topic option for setting a topic");
    }
    if (name.equals(topicName)) {
      return;
    }
    topic = topics.get(name);
    // The row's name is in memory that Spark uses again.
    topicName = name.copy();
    if (topic == null) {
      topic = open(topicName);
    }
  }

  private TopicBatches open(UTF8String name) {
    TargetTopic target = plan.target(name.toString());
    TopicBatches opened = new TopicBatches(target, encoder, file, keyless);
    topics.put(name, opened);
    return opened;
  }

  private void flush() {
    topics.values().forEach(TopicBatches::flush);
    openBytes = 0;
  }

  @Override
  public WriterCommitMessage commit() {
    flush();
    boolean placedByKey = topics.values().stream().anyMatch(TopicBatches::isPlacedByKey);
    return file.finish(task, placedByKey);
  }

  @Override
  public void abort() throws IOException {
    file.abandon();
  }

  @Override
  public void close() {
    encoder.close();
  }
}
