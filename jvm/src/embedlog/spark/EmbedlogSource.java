package embedlog.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * {@code format("embedlog")} in the JVM; Spark makes one for each load and save.
 *
 * <p>Spark prefers it to the Python source of the same name. If this Spark was not tested, or the
 * session asks for it, it passes everything on to that one.
 */
public final class EmbedlogSource implements TableProvider, DataSourceRegister {
  private final TableProvider pythonSource =
      ReaderChoice.isPython() ? ReaderChoice.pythonSource() : null;

  @Override
  public String shortName() {
    return ReaderChoice.FORMAT;
  }

  /** Checks all options of a reader: a wrong one is an error of {@code load}. */
  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    if (pythonSource != null) {
      return pythonSource.inferSchema(options);
    }
    return LogReader.check(Planner.active(), options.asCaseSensitiveMap(), null).schema();
  }

  /** Spark passes the schema of a user, of a table, or of the rows to write. */
  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  @Override
  public Table getTable(
      StructType schema, Transform[] partitioning, Map<String, String> properties) {
    if (pythonSource != null) {
      return pythonSource.getTable(schema, partitioning, properties);
    }
    return new LogTable(schema, properties);
  }
}
