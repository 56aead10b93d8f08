package embedlog.spark;

/** A planner ended before it answered; another one may be asked the same. */
final class PlannerDiedException extends Exception {
  private static final long serialVersionUID = 1L;

  PlannerDiedException(String message) {
    super(message);
  }
}
