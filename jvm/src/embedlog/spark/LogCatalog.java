package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.analysis.NoSuchNamespaceException;
import org.apache.spark.sql.catalyst.analysis.NoSuchTableException;
import org.apache.spark.sql.catalyst.analysis.TableAlreadyExistsException;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.catalog.NamespaceChange;
import org.apache.spark.sql.connector.catalog.StagedTable;
import org.apache.spark.sql.connector.catalog.StagingTableCatalog;
import org.apache.spark.sql.connector.catalog.SupportsNamespaces;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCatalog;
import org.apache.spark.sql.connector.catalog.TableChange;
import org.apache.spark.sql.connector.catalog.TableInfo;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The topics of a log as tables: {@code spark.sql.catalog.NAME=embedlog.spark.LogCatalog} with
 * {@code spark.sql.catalog.NAME.path=/data/log}.
 *
 * <p>All topics are in one namespace, which may be left out. Settings below the catalog's name are
 * options of all its tables. Nothing is cached, so topics of other processes appear immediately.
 */
public final class LogCatalog implements StagingTableCatalog, SupportsNamespaces {
  private static final String NAMESPACE = "default";
  private static final String CREATION = "The topic may have been created: see SHOW TABLES.";

  /** Properties that Spark adds to those of the user and that mean nothing to a topic. */
  private static final Set<String> IGNORED =
      Set.of(TableCatalog.PROP_OWNER, PROP_IS_MANAGED_LOCATION, PROP_PROVIDER);

  private String name;
  private Map<String, String> options;

  /**
   * Takes the settings below the name of the catalog.
   *
   * @throws EmbedlogException if the path is missing
   */
  @Override
  public void initialize(String name, CaseInsensitiveStringMap options) {
    this.name = name;
    this.options = options.asCaseSensitiveMap();
    if (options.getOrDefault("path", "").isBlank()) {
      throw invalid(
          "The catalog %s has no path. Set spark.sql.catalog.%s.path to the directory of the log.",
          name, name);
    }
  }

  @Override
  public String name() {
    return name;
  }

  @Override
  public String[] defaultNamespace() {
    return new String[] {NAMESPACE};
  }

  /** Returns the topics, without internal ones. */
  @Override
  public Identifier[] listTables(String[] namespace) throws NoSuchNamespaceException {
    checkNamespace(namespace);
    List<Identifier> tables = new ArrayList<>();
    Planner.active()
        .request("tables", Map.of("options", options))
        .forEach(topic -> tables.add(Identifier.of(defaultNamespace(), topic.asText())));
    return tables.toArray(Identifier[]::new);
  }

  @Override
  public Table loadTable(Identifier ident) throws NoSuchTableException {
    JsonNode answer = isNamespace(ident.namespace()) ? request("table", ident, Map.of()) : null;
    if (answer == null || answer.isNull()) {
      throw new NoSuchTableException(ident);
    }
    Map<String, String> properties = new HashMap<>(Map.of(PROP_PROVIDER, ReaderChoice.FORMAT));
    answer
        .properties()
        .forEach(property -> properties.put(property.getKey(), property.getValue().asText()));
    return new CatalogTable(fullName(ident), null, tableOptions(ident), properties);
  }

  private String fullName(Identifier ident) {
    return name + "." + NAMESPACE + "." + ident.name();
  }

  private Map<String, String> tableOptions(Identifier ident) {
    Map<String, String> ofTable = new HashMap<>(options);
    ofTable.put("subscribe", ident.name());
    return ofTable;
  }

  /**
   * Creates a topic: a typed one, unless its columns are those of a topic of bytes.
   *
   * <p>Its number of partitions and its settings are properties of the table.
   */
  @Override
  public Table createTable(Identifier ident, TableInfo info)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    createTopic(ident, info, false);
    try {
      return loadTable(ident);
    } catch (NoSuchTableException e) {
      throw invalid("The topic %s was deleted while Spark created it.", ident.name());
    }
  }

  /**
   * Begins {@code CREATE TABLE … AS SELECT}.
   *
   * <p>If the rows of a topic of bytes name partitions, and the statement does not say how many
   * there are, the writer creates the topic when it knows how many it needs; so a copy of a topic
   * has as many.
   */
  @Override
  public StagedTable stageCreate(Identifier ident, TableInfo info)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    boolean created = createTopic(ident, info, true);
    return new NewTopicTable(
        fullName(ident),
        tableOptions(ident),
        Map.of(),
        () -> {
          if (!created && !tableExists(ident)) {
            // There were no rows.
            Map<String, Object> params =
                Map.of("schema", new StructType().json(), "properties", Map.of());
            requestOnce("create_table", ident, params, CREATION);
          }
        },
        () -> {
          if (created) {
            dropTable(ident);
          }
        });
  }

  /**
   * Refuses to replace a topic.
   *
   * <p>Without this method Spark would delete the topic first, and fail then, because a log is
   * never overwritten.
   */
  @Override
  public StagedTable stageReplace(Identifier ident, TableInfo info) {
    throw invalid(
        "The topic %s cannot be replaced. Append to it, or delete it first: DROP TABLE.",
        ident.name());
  }

  @Override
  public StagedTable stageCreateOrReplace(Identifier ident, TableInfo info) {
    return stageReplace(ident, info);
  }

  /**
   * Creates a topic, unless the writer of a query is to do it; returns whether it was created.
   *
   * @param forQuery whether the rows of a query are written to it next
   */
  private boolean createTopic(Identifier ident, TableInfo info, boolean forQuery)
      throws TableAlreadyExistsException, NoSuchNamespaceException {
    checkNamespace(ident.namespace());
    if (info.partitions().length > 0) {
      throw invalid(
          "A topic cannot be partitioned by columns. Set the number of its partitions:"
              + " TBLPROPERTIES ('partitions' = '4').");
    }
    StructType columns = new StructType();
    for (Column column : info.columns()) {
      columns = columns.add(column.name(), column.dataType(), column.nullable());
    }
    Map<String, Object> params =
        Map.of(
            "schema", columns.json(),
            "properties", settings(info.properties()),
            "for_query", forQuery);
    String result = requestOnce("create_table", ident, params, CREATION).asText();
    if (result.equals("exists")) {
      throw new TableAlreadyExistsException(ident);
    }
    return result.equals("created");
  }

  /** Returns the properties that are about the topic, and refuses those that it cannot have. */
  private static Map<String, String> settings(Map<String, String> properties) {
    Map<String, String> settings = new HashMap<>(properties);
    // Writers that name no format pass Spark's default one.
    String provider = settings.getOrDefault(PROP_PROVIDER, ReaderChoice.FORMAT);
    if (!Set.of(ReaderChoice.FORMAT, SQLConf.get().defaultDataSourceName()).contains(provider)) {
      throw invalid("A topic cannot be stored as %s. Leave out USING %s.", provider, provider);
    }
    if (settings.containsKey(TableCatalog.PROP_LOCATION)) {
      throw invalid("A topic is in the directory of its log. Leave out LOCATION.");
    }
    if (settings.containsKey(TableCatalog.PROP_COMMENT)) {
      throw invalid("A topic has no comment. Leave out COMMENT.");
    }
    // Spark passes OPTIONS (…) twice: as properties, and with a prefix.
    settings.keySet().removeIf(property -> property.startsWith(OPTION_PREFIX));
    settings.keySet().removeAll(IGNORED);
    return settings;
  }

  /** Changes settings of a topic, its number of partitions, or the columns of a typed topic. */
  @Override
  public Table alterTable(Identifier ident, TableChange... changes) throws NoSuchTableException {
    Map<String, String> properties = new HashMap<>();
    List<Map<String, Object>> columns = new ArrayList<>();
    for (TableChange change : changes) {
      if (change instanceof TableChange.SetProperty set) {
        properties.put(set.property(), set.value());
      } else if (change instanceof TableChange.RemoveProperty remove) {
        properties.put(remove.property(), null);
      } else {
        columns.add(ColumnChanges.toJson(change));
      }
    }
    if (!properties.isEmpty() && !columns.isEmpty()) {
      throw invalid("Change the columns and the properties of a topic in two statements.");
    }
    if (!isNamespace(ident.namespace()) || !alterTopic(ident, properties, columns)) {
      throw new NoSuchTableException(ident);
    }
    return loadTable(ident);
  }

  private boolean alterTopic(
      Identifier ident, Map<String, String> properties, List<Map<String, Object>> columns) {
    if (columns.isEmpty()) {
      return request("alter_table", ident, Map.of("properties", properties)).asBoolean();
    }
    String todo = "The columns may have been changed: see DESCRIBE TABLE.";
    return requestOnce("alter_columns", ident, Map.of("changes", columns), todo).asBoolean();
  }

  /** Deletes the topic and its records. */
  @Override
  public boolean dropTable(Identifier ident) {
    return isNamespace(ident.namespace()) && request("drop_table", ident, Map.of()).asBoolean();
  }

  @Override
  public void renameTable(Identifier oldIdent, Identifier newIdent) {
    throw invalid(
        "The topic %s cannot be renamed. Create another one, and copy the records.",
        oldIdent.name());
  }

  @Override
  public String[][] listNamespaces() {
    return new String[][] {defaultNamespace()};
  }

  @Override
  public String[][] listNamespaces(String[] namespace) throws NoSuchNamespaceException {
    checkNamespace(namespace);
    return namespace.length == 0 ? listNamespaces() : new String[0][];
  }

  @Override
  public Map<String, String> loadNamespaceMetadata(String[] namespace)
      throws NoSuchNamespaceException {
    checkNamespace(namespace);
    return Map.of(SupportsNamespaces.PROP_LOCATION, options.get("path"));
  }

  @Override
  public void createNamespace(String[] namespace, Map<String, String> metadata) {
    throw oneNamespace();
  }

  @Override
  public void alterNamespace(String[] namespace, NamespaceChange... changes) {
    throw oneNamespace();
  }

  @Override
  public boolean dropNamespace(String[] namespace, boolean cascade) {
    throw oneNamespace();
  }

  private RuntimeException oneNamespace() {
    return invalid("The catalog %s has one namespace, %s, which stays as it is.", name, NAMESPACE);
  }

  /** Whether topics are there: {@code log.flights} is {@code log.default.flights}. */
  private static boolean isNamespace(String[] namespace) {
    return namespace.length == 0 || (namespace.length == 1 && namespace[0].equals(NAMESPACE));
  }

  private static void checkNamespace(String[] namespace) throws NoSuchNamespaceException {
    if (!isNamespace(namespace)) {
      throw new NoSuchNamespaceException(namespace);
    }
  }

  private JsonNode requestOnce(
      String method, Identifier ident, Map<String, Object> params, String todo) {
    return Planner.active().requestOnce(method, ofTopic(ident, params), todo);
  }

  private JsonNode request(String method, Identifier ident, Map<String, Object> params) {
    return Planner.active().request(method, ofTopic(ident, params));
  }

  private Map<String, Object> ofTopic(Identifier ident, Map<String, Object> params) {
    Map<String, Object> ofTopic = new HashMap<>(params);
    ofTopic.put("options", options);
    ofTopic.put("topic", ident.name());
    return ofTopic;
  }

  private static RuntimeException invalid(String message, Object... values) {
    return RefusedException.of("InvalidConfigError", String.format(message, values));
  }
}
