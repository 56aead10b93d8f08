package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.Map;
import java.util.Objects;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * A table that a catalog knows by a name, of Spark's own catalog or of a {@link LogCatalog}.
 *
 * <p>It may be read and written, so its options are those of a reader and of a writer; Python tells
 * them apart. They are checked when the columns are first asked for, as {@code CREATE TABLE} and
 * every query do, but not {@code DROP TABLE}: a table with wrong options can be dropped.
 */
class CatalogTable extends LogTable {
  private static final String PATH = "path";

  private final String name;
  private final StructType declared;
  private final Map<String, String> options;
  private final Map<String, String> properties;
  private StructType checked;

  /**
   * Makes a table.
   *
   * @param name its name in messages of Spark
   * @param declared the columns in {@code CREATE TABLE}; null for all
   * @param options the options of a reader and of a writer
   * @param properties what {@code SHOW TBLPROPERTIES} shows
   */
  CatalogTable(
      String name,
      StructType declared,
      Map<String, String> options,
      Map<String, String> properties) {
    super(declared, options);
    this.name = name;
    this.declared = declared;
    this.options = options;
    this.properties = properties;
  }

  /** Whether Spark passes the properties of a table in its own catalog, or else plain options. */
  static boolean isInSessionCatalog(Map<String, String> properties) {
    return properties.containsKey(TableCatalog.PROP_PROVIDER);
  }

  /**
   * Returns a table of Spark's own catalog.
   *
   * @param declared the columns that the catalog has for it; null if it is being created without
   * @param properties those of the user and of Spark, the options among them with a prefix
   */
  static CatalogTable inSessionCatalog(StructType declared, Map<String, String> properties) {
    Map<String, String> options = new HashMap<>();
    properties.forEach(
        (property, value) -> {
          if (property.startsWith(TableCatalog.OPTION_PREFIX)) {
            options.put(property.substring(TableCatalog.OPTION_PREFIX.length()), value);
          } else if (property.equals(PATH)) {
            // Spark makes the option a location, and that a path again.
            options.put(property, value);
          }
        });
    return new CatalogTable(ReaderChoice.FORMAT, declared, options, Map.of());
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public Map<String, String> properties() {
    return properties;
  }

  /**
   * Returns the columns.
   *
   * @throws EmbedlogException if an option or a column is wrong
   */
  @Override
  public synchronized StructType schema() {
    if (checked == null) {
      JsonNode answer =
          Planner.active().request("check_table", LogReader.params(options, declared));
      // Those that were declared may have comments.
      checked = declared == null ? LogReader.columns(answer) : declared;
    }
    return checked;
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap scanOptions) {
    Map<String, String> merged = merge("table_reader_options", scanOptions);
    if (ReaderChoice.isPython()) {
      Table table = ReaderChoice.pythonSource().getTable(schema(), null, merged);
      return ((SupportsRead) table).newScanBuilder(new CaseInsensitiveStringMap(merged));
    }
    return new LogScanBuilder(Planner.active(), merged, schema());
  }

  /**
   * Returns the builder of a write to the table's one topic.
   *
   * @throws EmbedlogException if the options name no topic, or several
   */
  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    Map<String, String> merged = merge("table_writer_options", info.options());
    SupportsWrite table = new LogTable(info.schema(), merged);
    if (ReaderChoice.isPython()) {
      table = (SupportsWrite) ReaderChoice.pythonSource().getTable(info.schema(), null, merged);
    }
    return table.newWriteBuilder(new TableWriteInfo(info, merged));
  }

  /** Names the table in the progress of a stream that writes to it. */
  @Override
  public String toString() {
    return name;
  }

  /** Spark loads a table for each query, and looks for an equal one among those it has cached. */
  @Override
  public boolean equals(Object other) {
    return other instanceof CatalogTable table
        && name.equals(table.name)
        && Objects.equals(declared, table.declared)
        && options.equals(table.options);
  }

  @Override
  public int hashCode() {
    return Objects.hash(name, options);
  }

  /** Returns the table's options of a reader or of a writer, with those of one query. */
  private Map<String, String> merge(String method, CaseInsensitiveStringMap ofQuery) {
    Map<String, Object> params =
        Map.of("options", options, "of_query", ofQuery.asCaseSensitiveMap());
    Map<String, String> merged = new HashMap<>();
    Planner.active()
        .request(method, params)
        .properties()
        .forEach(option -> merged.put(option.getKey(), option.getValue().asText()));
    return merged;
  }
}
