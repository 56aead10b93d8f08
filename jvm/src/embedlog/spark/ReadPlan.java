package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;

/**
 * What a query or a micro-batch reads, as the planner says.
 *
 * @param sizeInBytes about how many bytes of files
 * @param rows how many records, unless gaps between offsets make that unknown
 * @param partitions what each task reads
 */
record ReadPlan(long sizeInBytes, OptionalLong rows, LogInputPartition[] partitions) {

  /** Reads the planner's answer; embedlog/spark/plan.py writes it. */
  static ReadPlan parse(JsonNode plan) {
    String root = plan.get("root").asText();
    Map<String, TopicSchemas> schemas = TopicSchemas.parse(plan.get("schemas"));
    List<LogInputPartition> partitions = new ArrayList<>();
    for (JsonNode task : plan.get("tasks")) {
      List<PartitionSlice> slices = new ArrayList<>(task.size());
      task.forEach(slice -> slices.add(slice(slice)));
      partitions.add(new LogInputPartition(root, slices, schemas));
    }
    JsonNode rows = plan.get("rows");
    return new ReadPlan(
        plan.get("size").asLong(),
        rows.isNull() ? OptionalLong.empty() : OptionalLong.of(rows.asLong()),
        partitions.toArray(new LogInputPartition[0]));
  }

  private static PartitionSlice slice(JsonNode slice) {
    List<FileChunk> chunks = new ArrayList<>();
    for (JsonNode chunk : slice.get(7)) {
      chunks.add(
          new FileChunk(
              chunk.get(0).asText(),
              chunk.get(1).asBoolean(),
              chunk.get(2).asBoolean(),
              chunk.get(3).asLong(),
              chunk.get(4).asLong(),
              chunk.get(5).asInt()));
    }
    List<String> directories = new ArrayList<>();
    slice.get(8).forEach(directory -> directories.add(directory.asText()));
    return new PartitionSlice(
        slice.get(0).asText(),
        slice.get(1).asInt(),
        slice.get(2).asLong(),
        slice.get(3).asLong(),
        slice.get(4).asLong(),
        chunks,
        directories);
  }

  /** Whether each task reads a log partition of its own, so that Spark need not shuffle by it. */
  boolean isOneTaskPerLogPartition() {
    Set<Object> keys = new HashSet<>();
    for (LogInputPartition partition : partitions) {
      if (!partition.isOneLogPartition() || !keys.add(partition.partitionKey())) {
        return false;
      }
    }
    return true;
  }
}
