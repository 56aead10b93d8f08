package embedlog.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.StagedTable;

/** A topic that {@code CREATE TABLE … AS SELECT} is about to fill, and that a failure undoes. */
final class NewTopicTable extends CatalogTable implements StagedTable {
  private final Runnable commit;
  private final Runnable abort;

  /**
   * Makes a table.
   *
   * @param name its name in messages of Spark
   * @param options the options of a reader and of a writer
   * @param properties what {@code SHOW TBLPROPERTIES} shows
   * @param commit called when the rows are published
   * @param abort called if they are not
   */
  NewTopicTable(
      String name,
      Map<String, String> options,
      Map<String, String> properties,
      Runnable commit,
      Runnable abort) {
    super(name, null, options, properties);
    this.commit = commit;
    this.abort = abort;
  }

  @Override
  public void commitStagedChanges() {
    commit.run();
  }

  @Override
  public void abortStagedChanges() {
    abort.run();
  }
}
