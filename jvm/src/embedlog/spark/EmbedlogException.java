package embedlog.spark;

import java.io.IOException;
import java.net.InetAddress;
import java.nio.file.Path;
import java.util.Map;
import org.apache.spark.QueryContext;
import org.apache.spark.SparkRuntimeException;

/**
 * An error of embedlog, as its Python classes name and word it.
 *
 * <p>It is one of Spark's own with a condition, so Spark passes it on from a task as it is, and
 * PySpark shows its message alone. Where only the text of an exception is left, embedlog finds its
 * errors by the name of the Python class, with which {@link #toString} begins.
 */
class EmbedlogException extends SparkRuntimeException {
  private static final long serialVersionUID = 1L;

  private static final QueryContext[] NO_CONTEXT = {};

  private final ErrorText text;

  /**
   * Makes an error.
   *
   * @param type the class in {@code embedlog.errors}
   * @param message what happened, where, and what to do
   */
  EmbedlogException(String type, String message) {
    super(ErrorText.SPARKS_CONDITION, ErrorText.sparksParameters(message), null, NO_CONTEXT, "");
    text = new ErrorText(type, message);
  }

  @Override
  public String getMessage() {
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

  @Override
  public String toString() {
    return text.toString();
  }

  /** Returns the error for a batch that is not as it was written. */
  static EmbedlogException damagedBatch(String reason, String path, long position) {
    String problem = "The batch is damaged: " + reason;
    String todo = "Run verify, then repair, on the log.";
    return inFile("CorruptBatchError", problem, path, position, todo);
  }

  /** Returns the error for a batch of a newer version of embedlog. */
  static EmbedlogException newerFormat(String reason, String path, long position) {
    String problem = "The batch cannot be read: " + reason;
    return inFile("UnsupportedFormatError", problem, path, position, "Use a newer embedlog.");
  }

  /** Returns an error that says where in a file the problem is. */
  static EmbedlogException inFile(
      String type, String problem, String path, long position, String todo) {
    return new EmbedlogException(
        type, String.format("%s [%s, byte %d]. %s", problem, path, position, todo));
  }

  /** Returns the error for a sealed file that is shorter than it was. */
  static EmbedlogException truncatedFile(String path, long size, long published) {
    return new EmbedlogException(
        "CorruptionError",
        String.format(
            "The file ends at byte %d, %d were published [%s, byte %d]",
            size, published, path, size));
  }

  /** Returns the error for a topic that has columns, or bytes, and had not when the query began. */
  static EmbedlogException otherKindOfTopic(String topic) {
    return new EmbedlogException(
        "InvalidConfigError",
        "Topic "
            + topic
            + " does not have the columns of this query: it is new, or was created again. Load the"
            + " topic again; topics of bytes and topics with columns are read by queries of their"
            + " own.");
  }

  /** Returns the error for a log root that this host does not have. */
  static EmbedlogException noLogOnHost(String root) {
    return new EmbedlogException(
        "NotALogError",
        "The log is not on this host ["
            + root
            + "]. Executors use its files: mount the log's disk under the same path on all"
            + " hosts.");
  }

  /** Returns the error for a file or directory that this process has no permission for. */
  static EmbedlogException noPermission(Path path) {
    return new EmbedlogException(
        "StorageError",
        String.format(
            "%s has no permission: EACCES [%s]. Run it as the user who owns the log; share(group)"
                + " lets Spark's executors of other users read and stage.",
            executor(), path));
  }

  /** Returns which process this is, and on which host. */
  static String executor() {
    String host;
    try {
      host = InetAddress.getLocalHost().getHostName();
    } catch (IOException error) {
      host = "a host without a name";
    }
    return String.format("This executor (process %d on %s)", ProcessHandle.current().pid(), host);
  }
}
