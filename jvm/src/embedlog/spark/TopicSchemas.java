package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.HashMap;
import java.util.Map;

/**
 * The columns of a typed topic in a plan.
 *
 * @param columns its own columns by their names: those of the version that a query reads which has
 *     not met the topic before
 * @param segments the columns of its segments by the version of their schema: Arrow's messages in
 *     Base64
 */
record TopicSchemas(Map<String, TopicColumn> columns, Map<Integer, String> segments)
    implements Serializable {

  /** Reads the topics of a plan; embedlog/spark/plan.py writes them. */
  static Map<String, TopicSchemas> parse(JsonNode topics) {
    Map<String, TopicSchemas> schemas = new HashMap<>();
    for (Map.Entry<String, JsonNode> topic : topics.properties()) {
      Map<Integer, String> segments = new HashMap<>();
      for (Map.Entry<String, JsonNode> segment : topic.getValue().get("segments").properties()) {
        segments.put(Integer.valueOf(segment.getKey()), segment.getValue().asText());
      }
      Map<String, TopicColumn> columns = TopicColumn.parse(topic.getValue().get("columns"));
      schemas.put(topic.getKey(), new TopicSchemas(columns, segments));
    }
    return schemas;
  }
}
