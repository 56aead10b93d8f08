package embedlog.spark;

import java.io.Serializable;
import java.util.Locale;
import java.util.Map;

/**
 * What an error says, and what Spark calls it.
 *
 * @param type the class in {@code embedlog.errors}
 * @param message what happened, where, and what to do
 */
record ErrorText(String type, String message) implements Serializable {
  /**
   * A condition that Spark knows, for the constructors of its exceptions.
   *
   * <p>They look for the text of the condition, and Spark knows none of other projects.
   */
  static final String SPARKS_CONDITION = "USER_RAISED_EXCEPTION";

  /** Returns the parameters of {@link #SPARKS_CONDITION}. */
  static scala.collection.immutable.Map<String, String> sparksParameters(String message) {
    return new scala.collection.immutable.Map.Map1<>("errorMessage", message);
  }

  /** Returns the error condition: EMBEDLOG_DATA_LOSS for a DataLossError. */
  String condition() {
    String words =
        type.replaceFirst("Error$", "")
            .replaceAll("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_");
    return "EMBEDLOG_" + words.toUpperCase(Locale.ROOT);
  }

  Map<String, String> parameters() {
    return Map.of("error", type, "message", message);
  }

  @Override
  public String toString() {
    return "embedlog.errors." + type + ": " + message;
  }
}
