package embedlog.spark;

/** A planner ended before it answered; another one may be asked the same. */
final class PlannerDiedException extends Exception {
  private static final long serialVersionUID = 1L;

  private final boolean wasAsked;

  /**
   * Makes an exception.
   *
   * @param message how it died
   * @param wasAsked whether the request was sent, so that it may have done what it was asked
   */
  PlannerDiedException(String message, boolean wasAsked) {
    super(message);
    this.wasAsked = wasAsked;
  }

  boolean wasAsked() {
    return wasAsked;
  }
}
