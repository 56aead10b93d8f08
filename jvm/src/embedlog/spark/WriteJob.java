package embedlog.spark;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.types.StructType;

/**
 * What the driver asks the planner for one write: to check it, to publish it, or to give it up.
 *
 * <p>The planner knows everything about options and publications; this passes on what it needs.
 */
final class WriteJob {
  /** The local property in which Spark keeps the id of a query's run. */
  private static final String RUN_ID = "spark.jobGroup.id";

  private final Planner planner;
  private final Map<String, String> options;
  private final StructType schema;
  private final String queryId;

  /**
   * Makes the job of a write.
   *
   * @param planner the planner of the session
   * @param options the options of the writer
   * @param schema the columns of the rows
   * @param queryId the id of the streaming query, or any other
   */
  WriteJob(Planner planner, Map<String, String> options, StructType schema, String queryId) {
    this.planner = planner;
    this.options = options;
    this.schema = schema;
    this.queryId = queryId;
  }

  StructType schema() {
    return schema;
  }

  /** Returns the topic of all rows for descriptions; empty if a column says it. */
  String topic() {
    return options.getOrDefault("topic", "");
  }

  /**
   * Checks options and columns, creates the topic if it can, and returns what the tasks need.
   *
   * @param batch whether it is a write of one DataFrame
   * @param overwrite whether the records of the topic would have to be replaced
   * @throws EmbedlogException if the write is not possible
   */
  WritePlan plan(boolean batch, boolean overwrite) {
    Map<String, Object> params =
        Map.of("options", options, "schema", schema.json(), "batch", batch, "overwrite", overwrite);
    return WritePlan.parse(planner.request("plan_write", params));
  }

  /** Publishes what the tasks of a batch write staged: all of it, or nothing. */
  void publishBatch(WritePlan plan, WriterCommitMessage[] messages) {
    List<Long> topics = new ArrayList<>();
    // A DataFrame without rows counts as written to its topic, if that exists.
    if (plan.topic() != null && !plan.target(plan.topic()).isNew()) {
      topics.add(plan.target(plan.topic()).id());
    }
    Map<String, Object> params =
        Map.of("options", options, "staged", StagedRows.toJson(messages), "topics", topics);
    if (plan.repeatable()) {
      planner.request("publish_batch", params);
    } else {
      planner.requestOnce(
          "publish_batch",
          params,
          "The rows may be in the log or not: look at the end of the topic before you write them"
              + " again. A write with txnAppId and txnVersion may be repeated in any case.");
    }
  }

  /** Publishes what the tasks of a micro-batch staged, unless it was published before. */
  void publishMicroBatch(long batchId, WriterCommitMessage[] messages) {
    Map<String, Object> params = new HashMap<>();
    params.put("options", options);
    params.put("staged", StagedRows.toJson(messages));
    params.put("batch_id", batchId);
    params.put("query_id", queryId);
    params.put("run_id", SparkContext.getOrCreate().getLocalProperty(RUN_ID));
    planner.request("publish_micro_batch", params);
  }

  /** Removes what tasks staged; what was published of it is a copy, and stays. */
  void discard(WriterCommitMessage[] messages) {
    Map<String, Object> params = Map.of("options", options, "staged", StagedRows.toJson(messages));
    planner.requestAtEnd("discard", params);
  }
}
