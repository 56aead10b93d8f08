package embedlog.spark;

import java.util.Map;
import org.apache.spark.sql.AnalysisException;
import org.apache.spark.sql.catalyst.trees.Origin;

/** An error of what a query asks for, such as a wrong option or a topic that does not exist. */
final class RefusedException extends AnalysisException {
  private static final long serialVersionUID = 1L;

  private final ErrorText text;

  private RefusedException(ErrorText text) {
    super(ErrorText.SPARKS_CONDITION, ErrorText.sparksParameters(text.message()));
    this.text = text;
  }

  /**
   * Throws the error; callers write {@code throw} before it for the compiler.
   *
   * <p>Spark is written in Scala, which does not check exceptions; its interfaces declare none.
   *
   * @param type the class in {@code embedlog.errors}
   * @param message what is wrong, and what to do
   */
  static RuntimeException of(String type, String message) {
    return RefusedException.<RuntimeException>thrown(
        new RefusedException(new ErrorText(type, message)));
  }

  @SuppressWarnings("unchecked")
  private static <E extends Exception> RuntimeException thrown(Exception error) throws E {
    throw (E) error;
  }

  @Override
  public String getMessage() {
    return text.message();
  }

  @Override
  public String getSimpleMessage() {
    return text.message();
  }

  @Override
  public String getCondition() {
    return text.condition();
  }

  @Override
  public String getSqlState() {
    return null;
  }

  @Override
  public Map<String, String> getMessageParameters() {
    return text.parameters();
  }

  /** Spark would make an exception of its own class, with another message. */
  @Override
  public AnalysisException withPosition(Origin origin) {
    return this;
  }

  @Override
  public String toString() {
    return text.toString();
  }
}
