package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.LongSummaryStatistics;
import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadAllAvailable;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;

/** A streaming query on a log: Python decides what each micro-batch reads. */
final class LogMicroBatchStream
    implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
  private final PlannerStream stream;
  private final String topics;
  private final PartitionReaderFactory factory;

  /** The end of the log when Spark last asked for it. */
  private volatile StreamOffset logEnd;

  LogMicroBatchStream(
      Planner planner, Map<String, String> options, String topics, PartitionReaderFactory factory) {
    this.stream = new PlannerStream(planner, options);
    this.topics = topics;
    this.factory = factory;
  }

  @Override
  public Offset initialOffset() {
    return StreamOffset.of(stream.requestAndKeep("initial_offset", "initial"));
  }

  @Override
  public Offset deserializeOffset(String json) {
    return StreamOffset.parse(json);
  }

  /**
   * Returns a limit other than "all" if the options have one; Spark passes it back, except for
   * {@code Trigger.Once}. The planner knows the options, so only "all" or not matters there.
   */
  @Override
  public ReadLimit getDefaultReadLimit() {
    JsonNode limit = stream.limit();
    if (limit.isNull()) {
      return ReadLimit.allAvailable();
    }
    long number = limit.get(1).asLong();
    return switch (limit.get(0).asText()) {
      case "rows" -> ReadLimit.maxRows(number);
      case "bytes" -> ReadLimit.maxBytes(number);
      default -> ReadLimit.minRows(number, limit.get(2).asLong());
    };
  }

  @Override
  public Offset latestOffset() {
    throw new UnsupportedOperationException("Spark asks for the latest offset after another one");
  }

  /** Returns where the next micro-batch ends: {@code start} itself if there is nothing to read. */
  @Override
  public Offset latestOffset(Offset start, ReadLimit limit) {
    boolean limited = !(limit instanceof ReadAllAvailable);
    JsonNode from = StreamOffset.from(start).value();
    JsonNode latest = stream.request("latest_offset", Map.of("start", from, "limited", limited));
    // The text of an offset in a checkpoint may differ, and Spark would run an empty batch.
    return latest.equals(from) ? start : StreamOffset.of(latest);
  }

  @Override
  public Offset reportLatestOffset() {
    logEnd = StreamOffset.of(stream.request("report_latest_offset", Map.of()));
    return logEnd;
  }

  @Override
  public void prepareForTriggerAvailableNow() {
    stream.requestAndKeep("prepare_for_available_now", "available_now");
  }

  @Override
  public InputPartition[] planInputPartitions(Offset start, Offset end) {
    Map<String, Object> range =
        Map.of(
            "start", StreamOffset.from(start).value(),
            "end", StreamOffset.from(end).value(),
            "cores", Planner.cores());
    return ReadPlan.parse(stream.request("plan_micro_batch", range)).partitions();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return factory;
  }

  @Override
  public void commit(Offset end) {
    stream.request("commit", Map.of("end", StreamOffset.from(end).value()));
  }

  /** Releases the lease of the query. */
  @Override
  public void stop() {
    stream.close();
  }

  /** Returns how far the query is behind the end of the log, as Kafka's source names it. */
  @Override
  public Map<String, String> metrics(Optional<Offset> latestConsumedOffset) {
    if (logEnd == null || latestConsumedOffset.isEmpty()) {
      return Map.of();
    }
    Map<String, Long> consumed = StreamOffset.from(latestConsumedOffset.get()).byPartition();
    LongSummaryStatistics behind =
        logEnd.byPartition().entrySet().stream()
            .mapToLong(end -> Math.max(end.getValue() - consumed.getOrDefault(end.getKey(), 0L), 0))
            .summaryStatistics();
    if (behind.getCount() == 0) {
      return Map.of();
    }
    return Map.of(
        "minOffsetsBehindLatest", Long.toString(behind.getMin()),
        "maxOffsetsBehindLatest", Long.toString(behind.getMax()),
        "avgOffsetsBehindLatest", Double.toString(behind.getAverage()));
  }

  /** Names the source in the progress of the query. */
  @Override
  public String toString() {
    return "embedlog " + topics;
  }
}
