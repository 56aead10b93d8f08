package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;

/**
 * The options of a reader, checked by the planner.
 *
 * @param schema the columns
 * @param topics what is read, for descriptions
 * @param failOnDataLoss whether to fail if records are gone
 * @param typed where the columns of typed topics come from; null for topics of bytes
 */
record LogReader(StructType schema, String topics, boolean failOnDataLoss, TypedRequest typed) {

  /**
   * Checks options.
   *
   * @param planner the planner of the session
   * @param options the options as the user wrote them
   * @param schema a user's choice of columns; null for all
   * @throws EmbedlogException if an option or a column is wrong
   */
  static LogReader check(Planner planner, Map<String, String> options, StructType schema) {
    JsonNode answer = planner.request("check_reader", params(options, schema));
    StructType columns = schema == null ? columns(answer) : schema;
    JsonNode typed = answer.get("typed");
    return new LogReader(
        columns,
        answer.get("topics").asText(),
        answer.get("fail_on_data_loss").asBoolean(),
        typed.isNull() ? null : TypedRequest.parse(typed, columns));
  }

  /** Returns the parameters of a request that checks the options of a reader or of a table. */
  static Map<String, Object> params(Map<String, String> options, StructType schema) {
    Map<String, Object> params = new HashMap<>();
    params.put("options", options);
    params.put("schema", schema == null ? null : schema.json());
    return params;
  }

  /** Returns the columns that the planner sends, which are a type in JSON. */
  static StructType columns(JsonNode answer) {
    return (StructType) DataType.fromJson(answer.get("schema").asText());
  }
}
