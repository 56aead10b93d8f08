package embedlog.spark;

/** A newer version of embedlog wrote the batch, which need not be damaged at all. */
final class NewerFormatException extends DamagedBatchException {
  private static final long serialVersionUID = 1L;

  NewerFormatException(int version) {
    super("it has format version " + version + ", which is too new");
  }
}
