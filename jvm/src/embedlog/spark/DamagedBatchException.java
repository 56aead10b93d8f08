package embedlog.spark;

/** Says why the bytes of a batch are not as they were written; its reader adds where it is. */
class DamagedBatchException extends Exception {
  private static final long serialVersionUID = 1L;

  DamagedBatchException(String reason) {
    super(reason);
  }
}
