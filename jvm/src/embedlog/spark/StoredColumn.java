package embedlog.spark;

/**
 * Where a column of a batch is: its place among the columns, and among Arrow's nodes and buffers.
 *
 * @param name its name in the segment
 * @param number which column of a batch it is
 * @param firstNode which node of a batch is its own; those of what is inside of it follow
 * @param nodes how many nodes it has
 * @param firstBuffer which buffer of a batch is its first
 * @param buffers how many buffers it has
 */
record StoredColumn(
    String name, int number, int firstNode, int nodes, int firstBuffer, int buffers) {}
