package embedlog.spark;

import java.util.Set;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.spark.package$;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.internal.SQLConf;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Decides whether the JVM or Python reads the log. */
final class ReaderChoice {
  /** The name of the format, here and in Python. */
  static final String FORMAT = "embedlog";

  /** The setting of a session that decides: "jvm" or "python". */
  private static final String SETTING = "spark.embedlog.reader";

  /** The versions of Spark that the tests run with; the build takes them from Python. */
  private static final Set<String> TESTED_VERSIONS =
      Set.of(ReaderChoice.class.getPackage().getSpecificationVersion().split(" "));

  private static final Logger LOGGER = LoggerFactory.getLogger("embedlog.spark");
  private static final AtomicBoolean WARNED = new AtomicBoolean();

  private ReaderChoice() {}

  /** Whether the Python source is to serve in this session. */
  static boolean isPython() {
    String setting = SQLConf.get().getConfString(SETTING, "");
    return switch (setting) {
      case "jvm" -> false;
      case "python" -> true;
      case "" -> !isTested(package$.MODULE$.SPARK_VERSION());
      default ->
          throw RefusedException.of(
              "InvalidConfigError",
              SETTING + " must be jvm or python, got '" + setting + "'. Correct the setting.");
    };
  }

  private static boolean isTested(String version) {
    String[] numbers = version.split("\\.");
    boolean tested = numbers.length > 1 && TESTED_VERSIONS.contains(numbers[0] + "." + numbers[1]);
    if (!tested && WARNED.compareAndSet(false, true)) {
      LOGGER.warn(
          "The log is read by Python, which is slower: the reader in the JVM was not tested with"
              + " Spark {}. Set {}=jvm to use it anyway, or to python to hide this warning.",
          version,
          SETTING);
    }
    return tested;
  }

  /** Returns Spark's adapter of the Python source, which Spark finds or the session registered. */
  static TableProvider pythonSource() {
    PythonDataSourceV2 source = new PythonDataSourceV2();
    source.setShortName(FORMAT);
    return source;
  }
}
