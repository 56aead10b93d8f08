package embedlog.spark;

/**
 * Where the values of a vector are in a batch, and how errors name it.
 *
 * @param column the column, or what is inside of it, such as {@code route.origin}
 * @param node its node
 * @param buffer the first of its own buffers
 * @param damaged makes the error for a damaged value
 */
record VectorPlace(String column, int node, int buffer, DamagedValues damaged) {

  /** Returns the error for a value that is not as it was written. */
  RuntimeException damaged(String reason) {
    return damaged.error(column.isEmpty() ? reason : reason + ", of column " + column);
  }

  /** Returns the error for a value that the type of the query's column does not have. */
  EmbedlogException unfit(Object value, String type) {
    return new EmbedlogException(
        "InvalidRecordError",
        String.format(
            "Column %s has the value %s, which the type %s does not have. Load the topic again if"
                + " its schema has changed; else leave the column out.",
            column, value, type));
  }
}
