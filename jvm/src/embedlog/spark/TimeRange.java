package embedlog.spark;

import java.io.Serializable;

/**
 * Timestamps in milliseconds, both included; a reader skips batches that have none of them.
 *
 * @param first the least
 * @param last the greatest
 */
record TimeRange(long first, long last) implements Serializable {

  /** All timestamps. */
  static final TimeRange ALL = new TimeRange(Long.MIN_VALUE, Long.MAX_VALUE);

  private static final long NO_TIMESTAMP = -1;

  /** Whether a batch may have a record in this range. */
  boolean overlaps(BatchHead head) {
    // The least and greatest timestamps leave out records without one.
    boolean matchesNone = first <= NO_TIMESTAMP && NO_TIMESTAMP <= last;
    return matchesNone || head.maxTimestamp() >= first && head.minTimestamp() <= last;
  }

  /** Returns the timestamps that are in both ranges. */
  TimeRange intersect(TimeRange other) {
    return new TimeRange(Math.max(first, other.first), Math.min(last, other.last));
  }
}
