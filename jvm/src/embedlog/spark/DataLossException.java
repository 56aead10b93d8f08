package embedlog.spark;

/**
 * Says that records that a query planned to read are gone; an error unless the options allow it.
 */
final class DataLossException extends EmbedlogException {
  private static final long serialVersionUID = 1L;

  private final String problem;

  DataLossException(String problem, PartitionSlice slice) {
    super(
        "DataLossError",
        String.format(
            "%s [%s-%d, offset %d]. Load it again, or set failOnDataLoss to false to go on without"
                + " these records.",
            problem, slice.topic(), slice.partition(), slice.fromOffset()));
    this.problem = problem;
  }

  /** Returns what happened, without where and what to do. */
  String problem() {
    return problem;
  }
}
