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

  ColumnsWriteBuilder(WriteBuilder python) {
    this.python = python;
  }

  @Override
  public WriteBuilder truncate() {
    return ((SupportsTruncate) python).truncate();
  }

  @Override
  public Write build() {
    return python.build();
  }
}
