package embedlog.spark;

/**
 * Chooses partitions for the rows of a task that have no key: one after the other, for many rows
 * each, so that batches are large.
 *
 * <p>Tasks begin with different partitions; a task that is repeated chooses the same ones.
 */
final class KeylessPartitions {
  private static final int ROWS = 64 * 1024;
  private static final long BYTES = 16 << 20;

  private int next;
  private int turn;
  private int rows;
  private long bytes;

  /**
   * Makes the choices of one task.
   *
   * @param task the number of the task
   */
  KeylessPartitions(int task) {
    next = task;
  }

  /** Returns the next number; the partition is the remainder by how many there are. */
  int next() {
    int number = next;
    next = next + 1 & Integer.MAX_VALUE;
    return number;
  }

  /** Returns a number that changes when each topic is to go on to its next partition. */
  int turn() {
    return turn;
  }

  /** Counts a row. */
  void count(SinkRow row) {
    rows++;
    bytes += row.key().length() + row.value().length();
    if (rows >= ROWS || bytes >= BYTES) {
      turn++;
      rows = 0;
      bytes = 0;
    }
  }
}
