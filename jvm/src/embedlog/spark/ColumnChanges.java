package embedlog.spark;

import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;

/** The changes of columns by {@code ALTER TABLE}, as embedlog/spark/topic_tables.py takes them. */
final class ColumnChanges {
  private ColumnChanges() {}

  /**
   * Returns a change for the planner.
   *
   * @throws EmbedlogException if it is about something that a column of a topic does not have
   */
  static Map<String, Object> toJson(TableChange change) {
    Map<String, Object> json = new HashMap<>();
    if (change instanceof TableChange.AddColumn add && add.defaultValue() == null) {
      json.put("change", "add");
      json.put("schema", schema(change, add.dataType(), add.isNullable()));
      json.put("position", position(add.position()));
    } else if (change instanceof TableChange.DeleteColumn drop) {
      json.put("change", "drop");
      json.put("if_exists", drop.ifExists());
    } else if (change instanceof TableChange.RenameColumn rename) {
      json.put("change", "rename");
      json.put("name", rename.newName());
    } else if (change instanceof TableChange.UpdateColumnType update) {
      json.put("change", "type");
      json.put("schema", schema(change, update.newDataType(), true));
    } else if (change instanceof TableChange.UpdateColumnNullability update) {
      json.put("change", "nullable");
      json.put("nullable", update.nullable());
    } else if (change instanceof TableChange.UpdateColumnPosition update) {
      json.put("change", "position");
      json.put("position", position(update.position()));
    } else {
      throw RefusedException.of(
          "InvalidConfigError",
          "ALTER TABLE can add, drop, rename, move and widen columns of a topic, and let them be"
              + " null. Leave out comments, constraints and defaults; log.alter_topic(…,"
              + " defaults=…) in Python adds columns with defaults.");
    }
    json.put("column", ((TableChange.ColumnChange) change).fieldNames());
    return json;
  }

  /** Returns a schema with the column: a type alone does not have its collation in JSON. */
  private static String schema(TableChange change, DataType type, boolean nullable) {
    String[] path = ((TableChange.ColumnChange) change).fieldNames();
    return new StructType().add(path[path.length - 1], type, nullable).json();
  }

  /** Returns null, an empty list for the first place, or the column before. */
  private static List<String> position(TableChange.ColumnPosition position) {
    if (position instanceof TableChange.After after) {
      return List.of(after.column());
    }
    return position == null ? null : List.of();
  }
}
