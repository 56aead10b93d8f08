package embedlog.spark;

import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.WriterCommitMessage;

/** Writes one DataFrame: tasks stage files, and the planner publishes all or none. */
final class LogBatchWrite implements BatchWrite {
  private final WriteJob job;
  private final boolean overwrite;
  private WritePlan plan;

  LogBatchWrite(WriteJob job, boolean overwrite) {
    this.job = job;
    this.overwrite = overwrite;
  }

  @Override
  public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
    plan = job.plan(true, overwrite);
    return new LogDataWriterFactory(plan, job.schema());
  }

  /** Each attempt of a task has a file of its own, so any number of them may succeed. */
  @Override
  public boolean useCommitCoordinator() {
    return false;
  }

  @Override
  public void commit(WriterCommitMessage[] messages) {
    job.publishBatch(plan, messages);
  }

  @Override
  public void abort(WriterCommitMessage[] messages) {
    job.discard(messages);
  }

  @Override
  public String toString() {
    return "embedlog " + job.topic();
  }
}
