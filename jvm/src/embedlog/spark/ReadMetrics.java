package embedlog.spark;

import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

/** What a task has read, for Spark's UI. */
final class ReadMetrics {
  private static final String BYTES = "bytesRead";
  private static final String BATCHES = "batchesRead";

  private long bytes;
  private long batches;

  void countBytes(long count) {
    bytes += count;
  }

  void countBatch() {
    batches++;
  }

  /** Returns the metrics of a scan. */
  static CustomMetric[] supported() {
    return new CustomMetric[] {new BytesRead(), new BatchesRead()};
  }

  /** Returns the values now, with bytes that were not counted yet. */
  CustomTaskMetric[] values(long moreBytes) {
    return new CustomTaskMetric[] {
      new Value(BYTES, bytes + moreBytes), new Value(BATCHES, batches)
    };
  }

  private record Value(String name, long value) implements CustomTaskMetric {}

  /** Bytes of segment files; Spark makes the object by its class name. */
  public static final class BytesRead extends CustomSumMetric {
    @Override
    public String name() {
      return BYTES;
    }

    @Override
    public String description() {
      return "bytes read from the log";
    }
  }

  /** Batches of the log; Spark makes the object by its class name. */
  public static final class BatchesRead extends CustomSumMetric {
    @Override
    public String name() {
      return BATCHES;
    }

    @Override
    public String description() {
      return "batches read from the log";
    }
  }
}
