package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.SparkContext;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerApplicationEnd;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * What the driver asks Python: to check options, to plan queries, to keep leases.
 *
 * <p>A process serves all queries of a session. It is started by the first request, and again if it
 * dies; then requests that were not answered are repeated once, which all of them allow.
 */
final class Planner {
  private static final Logger LOGGER = LoggerFactory.getLogger("embedlog.spark");

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
   * Makes a request that must not be made twice: if the planner dies meanwhile, nobody knows whether
   * it did what it was asked.
   *
   * @param todo what the user can do then
   * @throws EmbedlogException if it fails in Python, or the planner dies
   */
  JsonNode requestOnce(String method, Map<String, ?> params, String todo) {
    try {
      return process().call(method, params);
    } catch (PlannerDiedException death) {
      throw new EmbedlogException(
          "ProcessDiedError",
          "The planner died in " + method + ": " + death.getMessage() + ". " + todo);
    }
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
    try {
      return request.send(process());
    } catch (PlannerDiedException first) {
      LOGGER.warn("Starting another planner: {}", first.getMessage());
    }
    try {
      return request.send(process());
    } catch (PlannerDiedException second) {
      String problem = "The planner died again: " + second.getMessage();
      throw new EmbedlogException("ProcessDiedError", problem);
    }
  }

  private synchronized PlannerProcess process() {
    if (closed) {
      // A stream may notice the end of its session later than this.
      throw new EmbedlogException("ClosedError", "The Spark session has ended. Start another one.");
    }
    if (process == null || process.isDead()) {
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
