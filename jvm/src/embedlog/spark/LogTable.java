package embedlog.spark;

import java.util.EnumSet;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Topics of a log as a table, which is read and written in the JVM. */
class LogTable implements SupportsRead, SupportsWrite {
  private final StructType schema;
  private final Map<String, String> options;

  /**
   * Makes a table.
   *
   * @param schema the columns to read, or those of the rows to write
   * @param options the options of a reader or of a writer
   */
  LogTable(StructType schema, Map<String, String> options) {
    this.schema = schema;
    this.options = options;
  }

  @Override
  public String name() {
    return ReaderChoice.FORMAT;
  }

  @Override
  @SuppressWarnings("deprecation") // Spark's own `columns` is made from it.
  public StructType schema() {
    return schema;
  }

  @Override
  public Set<TableCapability> capabilities() {
    return EnumSet.of(
        TableCapability.BATCH_READ,
        TableCapability.MICRO_BATCH_READ,
        TableCapability.BATCH_WRITE,
        TableCapability.STREAMING_WRITE,
        TableCapability.TRUNCATE,
        // The planner checks the columns by name, and takes text for bytes.
        TableCapability.ACCEPT_ANY_SCHEMA);
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap scanOptions) {
    Map<String, String> all = new HashMap<>(options);
    all.putAll(scanOptions.asCaseSensitiveMap());
    return new LogScanBuilder(Planner.active(), all, schema);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    Map<String, String> all = new TreeMap<>(String.CASE_INSENSITIVE_ORDER);
    all.putAll(options);
    all.putAll(info.options().asCaseSensitiveMap());
    if (isTypedTopic(Map.of("options", all))) {
      // Only Python encodes columns.
      Table python = ReaderChoice.pythonSource().getTable(info.schema(), null, all);
      return new ColumnsWriteBuilder(
          ((SupportsWrite) python).newWriteBuilder(new TableWriteInfo(info, all)),
          () -> isTypedTopic(Map.of("options", all, "schema", info.schema().json())));
    }
    return new LogWriteBuilder(new WriteJob(Planner.active(), all, info.schema(), info.queryId()));
  }

  private static boolean isTypedTopic(Map<String, Object> params) {
    return Planner.active().request("is_typed_topic", params).asBoolean();
  }
}
