package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.HashMap;
import java.util.Map;

/**
 * A column of a typed topic.
 *
 * @param id its field id, which stays when it is renamed
 * @param absent its value in rows that do not have it, as a stream of Arrow in Base64; null if that
 *     is null
 */
record TopicColumn(int id, String absent) implements Serializable {

  /** Reads the columns of a topic by their names. */
  static Map<String, TopicColumn> parse(JsonNode columns) {
    Map<String, TopicColumn> parsed = new HashMap<>();
    for (Map.Entry<String, JsonNode> column : columns.properties()) {
      JsonNode absent = column.getValue().get(1);
      String stream = absent.isNull() ? null : absent.asText();
      parsed.put(column.getKey(), new TopicColumn(column.getValue().get(0).asInt(), stream));
    }
    return parsed;
  }
}
