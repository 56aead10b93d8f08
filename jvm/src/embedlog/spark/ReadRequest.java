package embedlog.spark;

import java.io.Serializable;
import java.util.List;
import java.util.Set;

/**
 * What the tasks of a scan read, besides where.
 *
 * @param columns the names of the columns, in Spark's order
 * @param typed what is read of typed topics; null for topics of bytes
 * @param failOnDataLoss whether to fail if records are gone, or to go on without them
 * @param times the timestamps that the query's filters let pass
 * @param limit how many rows are enough for the query; negative if it wants all
 */
record ReadRequest(
    List<String> columns, TypedRequest typed, boolean failOnDataLoss, TimeRange times, int limit)
    implements Serializable {

  private static final int ALL_BYTES_AT_ONCE = 256 << 10;
  private static final int SOME_COLUMNS_AT_ONCE = 64 << 10;
  private static final int HEADS_AT_ONCE = 16 << 10;

  /** The columns that no batch stores, except for the offsets of compacted ones. */
  private static final Set<String> IN_HEADS =
      Set.of("topic", "partition", "offset", "timestampType");

  /** Returns how many bytes to read for the next head: more if what follows is wanted, too. */
  int readAhead() {
    if (columns.contains("value") && typed == null) {
      return ALL_BYTES_AT_ONCE;
    }
    boolean onlyHeads = IN_HEADS.containsAll(columns);
    return onlyHeads ? HEADS_AT_ONCE : SOME_COLUMNS_AT_ONCE;
  }
}
