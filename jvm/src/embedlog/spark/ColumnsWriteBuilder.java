package embedlog.spark;

import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend;

/**
 * Takes the mode of a write to a typed topic, which Python carries out.
 *
 * <p>Spark refuses the output mode "update" of sources in Python. Here it appends the rows of each
 * micro-batch, as {@link LogWriteBuilder} does.
 */
final class ColumnsWriteBuilder implements SupportsTruncate, SupportsStreamingUpdateAsAppend {
  private final WriteBuilder python;
  private final Runnable check;

  /**
   * Makes a builder.
   *
   * @param python the builder of the source in Python
   * @param check refuses the columns of the rows: Spark wraps what Python raises
   */
  ColumnsWriteBuilder(WriteBuilder python, Runnable check) {
    this.python = python;
    this.check = check;
  }

  @Override
  public WriteBuilder truncate() {
    return ((SupportsTruncate) python).truncate();
  }

  @Override
  public Write build() {
    check.run();
    return python.build();
  }
}
