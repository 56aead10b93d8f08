package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.spark.SparkContext;
import org.apache.spark.network.util.JavaUtils;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerApplicationEnd;
import org.apache.spark.sql.internal.SQLConf;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * What the driver asks Python: to check options, to plan queries, to keep leases.
 *
 * <p>A process serves all queries of a session. It is started by the first request, and again if it
 * dies; then requests that were not answered are repeated, which most of them allow.
 */
final class Planner {
  private static final Logger LOGGER = LoggerFactory.getLogger("embedlog.spark");

  /** How long a planner may take to start, or to answer a ping, before it is killed. */
  private static final String TIMEOUT = "spark.embedlog.planner.timeout";

  /**
   * To how many planners a request is made. A request of which they die must not go on for ever;
   * another one that is pending at the same time must survive that.
   */
  private static final int ATTEMPTS = 3;

  /** By Python: another session in the same JVM may have another one. */
  private static final Map<String, Planner> PLANNERS = new ConcurrentHashMap<>();

  private final String python;
  private PlannerProcess process;
  private boolean closed;

  private Planner(String python) {
    this.python = python;
  }

  /** Returns the planner of the session, which ends with the session. */
  static Planner active() {
    SparkContext context = SparkContext.getOrCreate();
    return PLANNERS.computeIfAbsent(python(context), python -> open(python, context));
  }

  private static Planner open(String python, SparkContext context) {
    Planner planner = new Planner(python);
    context.addSparkListener(
        new SparkListener() {
          @Override
          public void onApplicationEnd(SparkListenerApplicationEnd end) {
            PLANNERS.remove(python, planner);
            planner.close();
          }
        });
    return planner;
  }

  /** Returns the Python of Spark's workers; that of the driver may be a shell, such as Jupyter. */
  private static String python(SparkContext context) {
    String fromEnvironment = System.getenv().getOrDefault("PYSPARK_PYTHON", "python3");
    return context.conf().get("spark.pyspark.python", fromEnvironment);
  }

  static long timeoutMillis() {
    String timeout = SQLConf.get().getConfString(TIMEOUT, "120s");
    try {
      return Math.max(TimeUnit.SECONDS.toMillis(JavaUtils.timeStringAsSec(timeout)), 1);
    } catch (NumberFormatException e) {
      String problem = TIMEOUT + " must be a time such as 120s, got '" + timeout + "'.";
      throw RefusedException.of("InvalidConfigError", problem + " Correct the setting.");
    }
  }

  /** Returns how many tasks the session runs at once, by which plans are split. */
  static int cores() {
    return SparkContext.getOrCreate().defaultParallelism();
  }

  /**
   * Makes a request that belongs to no stream, and returns its result.
   *
   * @param params the arguments by name: strings, numbers, lists, maps and JSON nodes
   * @throws EmbedlogException if it fails in Python, or Python cannot be started
   */
  JsonNode request(String method, Map<String, ?> params) {
    return repeatIfPlannerDies(process -> process.call(method, params));
  }

  /**
   * Makes a request that must not be made twice: if the planner dies meanwhile, nobody knows
   * whether it did what it was asked.
   *
   * @param todo what the user can do then
   * @throws EmbedlogException if it fails in Python, or the planner dies
   */
  JsonNode requestOnce(String method, Map<String, ?> params, String todo) {
    return repeatIfPlannerDies(
        process -> {
          try {
            return process.call(method, params);
          } catch (PlannerDiedException death) {
            if (death.wasAsked()) {
              String problem = "The planner died in " + method + ": " + death.getMessage();
              throw new EmbedlogException("ProcessDiedError", problem + ". " + todo);
            }
            throw death;
          }
        });
  }

  /** Makes a request whose failure does no harm, and waits for it even if interrupted. */
  void requestAtEnd(String method, Map<String, ?> params) {
    process().callAtEnd(method, params);
  }

  /** A request, or several, to one process. */
  @FunctionalInterface
  interface Request {
    JsonNode send(PlannerProcess process) throws PlannerDiedException;
  }

  JsonNode repeatIfPlannerDies(Request request) {
    for (int attempt = 1; ; attempt++) {
      try {
        return request.send(process());
      } catch (PlannerDiedException died) {
        if (attempt == ATTEMPTS) {
          String problem = attempt + " planners died, the last one so: " + died.getMessage();
          String todo = ". See the log of Spark's driver, and start the query again.";
          throw new EmbedlogException("ProcessDiedError", problem + todo);
        }
      }
    }
  }

  private synchronized PlannerProcess process() {
    if (closed) {
      // A stream may notice the end of its session later than this.
      throw new EmbedlogException("ClosedError", "The Spark session has ended. Start another one.");
    }
    if (process != null && process.death() != null) {
      LOGGER.warn("Starting another planner: {}", process.death());
      process = null;
    }
    if (process == null) {
      process = PlannerProcess.start(python);
    }
    return process;
  }

  private synchronized void close() {
    closed = true;
    if (process != null) {
      process.close();
    }
  }
}
