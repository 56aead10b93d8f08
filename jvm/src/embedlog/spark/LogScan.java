package embedlog.spark;

import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Expressions;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportPartitioning;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.partitioning.KeyGroupedPartitioning;
import org.apache.spark.sql.connector.read.partitioning.Partitioning;
import org.apache.spark.sql.connector.read.partitioning.UnknownPartitioning;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/** One reading of the log, as a batch that sees what is in the log now, or as a stream. */
final class LogScan implements Batch, SupportsReportPartitioning, SupportsReportStatistics {
  private final Planner planner;
  private final Map<String, String> options;
  private final LogReader reader;
  private final StructType columns;
  private final List<PushedFilter> filters;
  private final List<PushedFilter> columnFilters;
  private final int limit;
  private final BatchPlan plan;

  /** Whether micro-batches read: then there is no plan of all that is in the log. */
  private volatile boolean isStream;

  LogScan(
      Planner planner,
      Map<String, String> options,
      LogReader reader,
      StructType columns,
      List<PushedFilter> filters,
      List<PushedFilter> columnFilters,
      int limit,
      BatchPlan plan) {
    this.planner = planner;
    this.options = options;
    this.reader = reader;
    this.columns = columns;
    this.filters = List.copyOf(filters);
    this.columnFilters = List.copyOf(columnFilters);
    this.limit = limit;
    this.plan = plan;
  }

  @Override
  public StructType readSchema() {
    return columns;
  }

  @Override
  public String description() {
    StringBuilder text = new StringBuilder("embedlog ").append(reader.topics());
    text.append(" (read by the JVM): ").append(String.join(", ", columns.fieldNames()));
    if (!filters.isEmpty()) {
      text.append("; filters ").append(filters);
    }
    if (!columnFilters.isEmpty()) {
      text.append("; skips by ").append(columnFilters);
    }
    if (limit != BatchPlan.NO_LIMIT) {
      text.append("; limit ").append(limit);
    }
    return text.toString();
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.SUPPORTED;
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    return ReadMetrics.supported();
  }

  @Override
  public Batch toBatch() {
    return this;
  }

  @Override
  public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
    isStream = true;
    return new LogMicroBatchStream(planner, options, reader.topics(), createReaderFactory());
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return plan.get().partitions();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    TimeRange times =
        filters.stream().map(PushedFilter::times).reduce(TimeRange.ALL, TimeRange::intersect);
    return new LogReaderFactory(
        new ReadRequest(
            List.of(columns.fieldNames()),
            reader.typed() == null ? null : reader.typed().select(columns),
            reader.failOnDataLoss(),
            times,
            limit));
  }

  /** If each task reads a partition of the log, Spark need not shuffle to group by it. */
  @Override
  public Partitioning outputPartitioning() {
    if (isStream) {
      return new UnknownPartitioning(0);
    }
    int tasks = plan.get().partitions().length;
    boolean hasKeys =
        Set.of(reader.schema().fieldNames()).containsAll(List.of("topic", "partition"));
    if (tasks == 0 || !hasKeys || !plan.get().isOneTaskPerLogPartition()) {
      return new UnknownPartitioning(tasks);
    }
    Expression[] keys = {Expressions.identity("topic"), Expressions.identity("partition")};
    return new KeyGroupedPartitioning(keys, tasks);
  }

  @Override
  public Statistics estimateStatistics() {
    if (isStream) {
      return statistics(OptionalLong.empty(), OptionalLong.empty());
    }
    // As for files of columns: a part of the bytes for a part of the columns.
    double part = (double) columns.defaultSize() / reader.schema().defaultSize();
    long bytes = (long) (plan.get().sizeInBytes() * part);
    return statistics(OptionalLong.of(bytes), plan.get().rows());
  }

  private static Statistics statistics(OptionalLong bytes, OptionalLong rows) {
    return new Statistics() {
      @Override
      public OptionalLong sizeInBytes() {
        return bytes;
      }

      @Override
      public OptionalLong numRows() {
        return rows;
      }
    };
  }
}
