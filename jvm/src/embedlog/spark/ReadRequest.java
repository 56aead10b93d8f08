package embedlog.spark;

import java.io.Serializable;
import java.util.List;

/**
 * What the tasks of a scan read, besides where.
 *
 * @param columns the names of the columns, in Spark's order
 * @param failOnDataLoss whether to fail if records are gone, or to go on without them
 * @param times the timestamps that the query's filters let pass
 * @param limit how many rows are enough for the query; negative if it wants all
 */
record ReadRequest(List<String> columns, boolean failOnDataLoss, TimeRange times, int limit)
    implements Serializable {

  private static final int ALL_BYTES_AT_ONCE = 256 << 10;
  private static final int SOME_COLUMNS_AT_ONCE = 64 << 10;
  private static final int HEADS_AT_ONCE = 16 << 10;

  /** Returns how many bytes to read for the next head: more if what follows is wanted, too. */
  int readAhead() {
    if (columns.contains("value")) {
      return ALL_BYTES_AT_ONCE;
    }
    boolean onlyHeads =
        !columns.contains("timestamp") && !columns.contains("key") && !columns.contains("headers");
    return onlyHeads ? HEADS_AT_ONCE : SOME_COLUMNS_AT_ONCE;
  }
}
