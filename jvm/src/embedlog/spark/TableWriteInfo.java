package embedlog.spark;

import java.util.Map;
import java.util.Optional;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * What Spark says about a write to a table, with the options of the table.
 *
 * @param info what Spark says
 * @param merged the options of the table and of the write
 */
record TableWriteInfo(LogicalWriteInfo info, Map<String, String> merged)
    implements LogicalWriteInfo {

  @Override
  public CaseInsensitiveStringMap options() {
    return new CaseInsensitiveStringMap(merged);
  }

  @Override
  public String queryId() {
    return info.queryId();
  }

  @Override
  public StructType schema() {
    return info.schema();
  }

  @Override
  public Optional<StructType> rowIdSchema() {
    return info.rowIdSchema();
  }

  @Override
  public Optional<StructType> metadataSchema() {
    return info.metadataSchema();
  }
}
