package embedlog.spark;

import java.util.UUID;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.types.StructType;

/**
 * Makes the writers of tasks, on the executors.
 *
 * @param plan what all tasks need to know
 * @param schema the columns of the rows
 */
record LogDataWriterFactory(WritePlan plan, StructType schema)
    implements DataWriterFactory, StreamingDataWriterFactory {

  @Override
  public DataWriter<InternalRow> createWriter(int partitionId, long taskId) {
    // Each application numbers its tasks from 0, and each stage its attempts.
    TaskContext task = TaskContext.get();
    int attempt = task == null ? 0 : task.attemptNumber();
    String unique = UUID.randomUUID().toString().replace("-", "").substring(0, 12);
    String fileName = String.format("%05d-%d-%s", partitionId, attempt, unique);
    return new LogDataWriter(plan, schema, partitionId, fileName);
  }

  @Override
  public DataWriter<InternalRow> createWriter(int partitionId, long taskId, long epochId) {
    return createWriter(partitionId, taskId);
  }
}
