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
 * @param hasTombstones whether it reads the rows that delete their key
 * @param topics the columns of each topic, by their names in the query
 */
record TypedRequest(
    StructType columns, boolean hasTombstones, Map<String, Map<String, TopicColumn>> topics)
    implements Serializable {

  /** Reads what the planner says; embedlog/spark/query_schemas.py writes it. */
  static TypedRequest parse(JsonNode typed, StructType columns) {
    Map<String, Map<String, TopicColumn>> topics = new HashMap<>();
    for (Map.Entry<String, JsonNode> topic : typed.get("topics").properties()) {
      topics.put(topic.getKey(), TopicColumn.parse(topic.getValue()));
    }
    return new TypedRequest(columns, typed.get("tombstones").asBoolean(), topics);
  }

  /** Returns the same for some of the columns. */
  TypedRequest select(StructType pruned) {
    return new TypedRequest(pruned, hasTombstones, topics);
  }
}
