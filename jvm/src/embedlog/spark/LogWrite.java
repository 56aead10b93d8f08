package embedlog.spark;

import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;

/**
 * One write to the log.
 *
 * @param job what the planner is asked for it
 * @param truncate whether Spark's mode would replace what is in the topic
 */
record LogWrite(WriteJob job, boolean truncate) implements Write {

  @Override
  public BatchWrite toBatch() {
    return new LogBatchWrite(job, truncate);
  }

  /** The mode "complete" appends the whole result, as with Kafka's sink. */
  @Override
  public StreamingWrite toStreaming() {
    return new LogStreamingWrite(job);
  }

  @Override
  public String description() {
    return "embedlog " + job.topic() + " (written by the JVM)";
  }

  @Override
  public String toString() {
    return description();
  }
}
