package embedlog.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.connector.read.streaming.Offset;

/**
 * The next offset to read of each partition, as {@code {"flights": {"0": 23}}}; only Python knows
 * the rest of it. One from a checkpoint keeps its text: Spark compares offsets by that.
 */
final class StreamOffset extends Offset {
  private final String text;
  private final JsonNode value;

  private StreamOffset(String text, JsonNode value) {
    this.text = text;
    this.value = value;
  }

  static StreamOffset of(JsonNode value) {
    return new StreamOffset(Json.write(value), value);
  }

  /** Returns the offset in a text from a checkpoint. */
  static StreamOffset parse(String text) {
    try {
      return new StreamOffset(text, Json.parse(text));
    } catch (JsonProcessingException e) {
      String problem = "The checkpoint holds an offset that is not a position in a log: " + text;
      String todo = "Use the checkpoint of a query that read a log, or an empty directory.";
      throw RefusedException.of("InvalidConfigError", problem + ". " + todo);
    }
  }

  /** Returns this class's form of an offset that Spark passes. */
  static StreamOffset from(Offset offset) {
    return offset instanceof StreamOffset own ? own : parse(offset.json());
  }

  @Override
  public String json() {
    return text;
  }

  JsonNode value() {
    return value;
  }

  /** Returns the offset of each partition, such as {@code flights-0}. */
  Map<String, Long> byPartition() {
    Map<String, Long> offsets = new HashMap<>();
    for (Map.Entry<String, JsonNode> topic : value.properties()) {
      // No topic begins with "@": that is what Python keeps beside the offsets.
      if (!topic.getKey().startsWith("@")) {
        for (Map.Entry<String, JsonNode> partition : topic.getValue().properties()) {
          String name = topic.getKey() + "-" + partition.getKey();
          offsets.put(name, partition.getValue().asLong());
        }
      }
    }
    return offsets;
  }
}
