package embedlog.spark;

import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;

/** Writes each micro-batch of a query once; Spark makes one for each of them. */
final class LogStreamingWrite implements StreamingWrite {
  private final WriteJob job;

  LogStreamingWrite(WriteJob job) {
    this.job = job;
  }

  @Override
  public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
    return new LogDataWriterFactory(job.plan(false, false), job.schema());
  }

  /** Each attempt of a task has a file of its own, so any number of them may succeed. */
  @Override
  public boolean useCommitCoordinator() {
    return false;
  }

  @Override
  public void commit(long epochId, WriterCommitMessage[] messages) {
    job.publishMicroBatch(epochId, messages);
  }

  @Override
  public void abort(long epochId, WriterCommitMessage[] messages) {
    job.discard(messages);
  }

  @Override
  public String toString() {
    return "embedlog " + job.topic();
  }
}
