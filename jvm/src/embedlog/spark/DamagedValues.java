package embedlog.spark;

/** Makes the error for a value that turns out to be damaged when Spark asks for it. */
@FunctionalInterface
interface DamagedValues {
  /** Returns an error that names the batch. */
  RuntimeException error(String reason);
}
