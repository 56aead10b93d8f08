package embedlog.spark;

import java.util.List;
import java.util.Map;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.read.HasPartitionKey;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * What one task reads.
 *
 * @param root the log root, which must be at the same path on all hosts
 * @param slices the slices, one after the other
 * @param schemas the columns of typed topics
 */
record LogInputPartition(
    String root, List<PartitionSlice> slices, Map<String, TopicSchemas> schemas)
    implements HasPartitionKey {

  /** Whether all rows are of one partition of the log. */
  boolean isOneLogPartition() {
    PartitionSlice first = slices.get(0);
    return slices.stream()
        .allMatch(
            slice -> slice.topic().equals(first.topic()) && slice.partition() == first.partition());
  }

  /** Returns topic and partition; Spark asks only if all tasks read one log partition each. */
  @Override
  public InternalRow partitionKey() {
    PartitionSlice first = slices.get(0);
    return new GenericInternalRow(
        new Object[] {UTF8String.fromString(first.topic()), first.partition()});
  }
}
