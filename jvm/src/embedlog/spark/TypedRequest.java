package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.types.StructType;

/**
 * What a query reads of typed topics.
 *
 * @param columns the columns of the query, in Spark's order
 * @param isStruct whether the topic's own columns are the fields of one, {@code value}
 * @param hasTombstones whether it reads the rows that delete their key
 * @param topics the columns of each topic, by their names in the query
 */
record TypedRequest(
    StructType columns,
    boolean isStruct,
    boolean hasTombstones,
    Map<String, Map<String, TopicColumn>> topics)
    implements Serializable {

  /**
   * A column of a topic.
   *
   * @param id its field id, which stays when it is renamed
   * @param absent its value in rows that do not have it, as a stream of Arrow in Base64; null if
   *     that is null
   */
  record TopicColumn(int id, String absent) implements Serializable {}

  /** Reads what the planner says; embedlog/spark/typed_plan.py writes it. */
  static TypedRequest parse(JsonNode typed, StructType columns) {
    Map<String, Map<String, TopicColumn>> topics = new HashMap<>();
    for (Map.Entry<String, JsonNode> topic : typed.get("topics").properties()) {
      Map<String, TopicColumn> ofTopic = new HashMap<>();
      for (Map.Entry<String, JsonNode> column : topic.getValue().properties()) {
        JsonNode absent = column.getValue().get(1);
        ofTopic.put(
            column.getKey(),
            new TopicColumn(
                column.getValue().get(0).asInt(), absent.isNull() ? null : absent.asText()));
      }
      topics.put(topic.getKey(), ofTopic);
    }
    boolean isStruct = typed.get("values").asText().equals("struct");
    return new TypedRequest(columns, isStruct, typed.get("tombstones").asBoolean(), topics);
  }

  /** Returns the same for some of the columns. */
  TypedRequest select(StructType pruned) {
    return new TypedRequest(pruned, isStruct, hasTombstones, topics);
  }
}
