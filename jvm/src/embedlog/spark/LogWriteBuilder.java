package embedlog.spark;

import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend;

/**
 * Takes the mode of a write. A stream may have any output mode, and appends the rows of each
 * micro-batch, as with Kafka's sink; a batch may only append.
 */
final class LogWriteBuilder implements SupportsTruncate, SupportsStreamingUpdateAsAppend {
  private final WriteJob job;
  private boolean truncate;

  LogWriteBuilder(WriteJob job) {
    this.job = job;
  }

  /** Spark calls this for {@code mode("overwrite")}, and for the output mode "complete". */
  @Override
  public WriteBuilder truncate() {
    truncate = true;
    return this;
  }

  @Override
  public Write build() {
    return new LogWrite(job, truncate);
  }
}
