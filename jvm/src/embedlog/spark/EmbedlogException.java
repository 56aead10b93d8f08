package embedlog.spark;

import java.io.IOException;
import java.net.InetAddress;
import java.nio.file.Path;

/**
 * An error of embedlog, as its Python classes name and word it.
 *
 * <p>The message begins with the name of the Python class, by which embedlog finds its errors in
 * the text of Spark's.
 */
class EmbedlogException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /**
   * Makes an error.
   *
   * @param type the class in {@code embedlog.errors}
   * @param message what happened, where, and what to do
   */
  EmbedlogException(String type, String message) {
    super("embedlog.errors." + type + ": " + message);
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
            + "]. Executors read its files: mount the log's disk under the same path on all"
            + " hosts.");
  }

  /** Returns the error for a file or directory that this process has no permission for. */
  static EmbedlogException noPermission(Path path) {
    return new EmbedlogException(
        "StorageError",
        String.format(
            "%s has no permission: EACCES [%s]. Run it as the user who owns the log, or have that"
                + " user call share(group).",
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
