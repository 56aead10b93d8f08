package embedlog.spark;

import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * {@code format("embedlog")} in the JVM; Spark makes one for each load, save and use of a table.
 *
 * <p>Spark prefers it to the Python source of the same name. If this Spark was not tested, or the
 * session asks for it, it passes everything on to that one.
 */
public final class EmbedlogSource implements TableProvider, DataSourceRegister {
  /** The source that serves in place of this one, if any; null until it is first asked for. */
  private Optional<TableProvider> pythonSource;

  @Override
  public String shortName() {
    return ReaderChoice.FORMAT;
  }

  /** Checks all options of a reader or of a table: a wrong one is an error of {@code load}. */
  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    Map<String, String> properties = options.asCaseSensitiveMap();
    if (CatalogTable.isInSessionCatalog(properties)) {
      return CatalogTable.inSessionCatalog(null, properties).schema();
    }
    if (pythonSource().isPresent()) {
      return pythonSource().get().inferSchema(options);
    }
    return LogReader.check(Planner.active(), properties, null).schema();
  }

  /** Spark passes the schema of a user, of a table, or of the rows to write. */
  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  @Override
  public Table getTable(
      StructType schema, Transform[] partitioning, Map<String, String> properties) {
    if (CatalogTable.isInSessionCatalog(properties)) {
      return CatalogTable.inSessionCatalog(schema, properties);
    }
    if (pythonSource().isPresent()) {
      return pythonSource().get().getTable(schema, partitioning, properties);
    }
    return new LogTable(schema, properties);
  }

  /**
   * Decides once: Python's source keeps what it inferred for the table.
   *
   * <p>Not in the constructor: Spark makes a source of each format to find one by its name, so an
   * exception there would break all formats.
   *
   * @throws EmbedlogException if the session's setting is wrong
   */
  private Optional<TableProvider> pythonSource() {
    if (pythonSource == null) {
      boolean isPython = ReaderChoice.isPython();
      pythonSource = isPython ? Optional.of(ReaderChoice.pythonSource()) : Optional.empty();
    }
    return pythonSource;
  }
}
