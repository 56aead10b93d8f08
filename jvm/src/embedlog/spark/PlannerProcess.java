package embedlog.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.MissingNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * One Python process that plans queries, and the pipes to it; see {@code embedlog.spark.planner}.
 *
 * <p>Any thread may make requests: one thread reads all answers and passes each to the thread that
 * waits for it. A thread that is interrupted leaves alone, and its answer is dropped.
 *
 * <p>A request may take long, for example while another process holds a lock. But a planner answers
 * a ping immediately; one that does not is stopped or stuck, and is killed.
 */
final class PlannerProcess {
  private static final String MODULE = "embedlog.spark.planner";
  private static final String TODO =
      "Set spark.pyspark.python, or PYSPARK_PYTHON, to a Python with embedlog before the session"
          + " starts.";
  private static final long SECONDS_TO_END = 10;

  /**
   * A planner is silent for too long after so many waits, one after the other, without a sign of
   * it: were it one long wait, a JVM that is itself stopped for a time would kill its planner.
   */
  private static final int WAITS = 10;

  /** What Java reports for a process that was killed by signal 1; it adds the signal to 128. */
  private static final int FIRST_SIGNAL_STATUS = 129;

  private static final Logger LOGGER = LoggerFactory.getLogger("embedlog.spark");

  private final String python;
  private final Process process;
  private final PythonErrors errors;
  private final RequestWriter requests;
  private final AtomicLong lastId = new AtomicLong();
  private final Map<Long, CompletableFuture<JsonNode>> pending = new ConcurrentHashMap<>();

  /** Completed when the planner has told its version, or cannot be used. */
  private final CompletableFuture<Void> started = new CompletableFuture<>();

  /** How many lines the planner has printed on stdout: its signs of life. */
  private final AtomicLong lines = new AtomicLong();

  /** Why this process killed the planner, if it did. */
  private volatile String reasonToKill;

  /** Why there will be no more answers, once the process has ended. */
  private volatile String death;

  private PlannerProcess(String python, Process process) {
    this.python = python;
    this.process = process;
    errors = new PythonErrors(process.getErrorStream());
    requests = new RequestWriter(process.getOutputStream());
  }

  /**
   * Starts a planner, and returns before it is ready: the first request waits for that.
   *
   * @throws EmbedlogException if there is no such program
   */
  static PlannerProcess start(String python) {
    try {
      Process process = new ProcessBuilder(python, "-m", MODULE).start();
      PlannerProcess planner = new PlannerProcess(python, process);
      planner.errors.start();
      Thread reader = new Thread(planner::readAnswers, "embedlog-planner-answers");
      reader.setDaemon(true);
      reader.start();
      return planner;
    } catch (IOException e) {
      String problem = "The Python " + python + " cannot be started: " + e.getMessage();
      throw new EmbedlogException("SparkSetupError", problem + ". " + TODO);
    }
  }

  /** Returns why the process has ended; null as long as it has not. */
  String death() {
    return death;
  }

  /** Has the process release its leases and end, once it has answered all requests. */
  void close() {
    requests.close();
  }

  /**
   * Makes a request, and waits for the answer as long as the planner shows signs of life.
   *
   * @throws EmbedlogException if the answer is an error, or the Python has no planner
   * @throws PlannerDiedException if the process ends before it answers
   * @throws UncheckedIOException if the thread is interrupted; Spark stops a query so
   */
  JsonNode call(String method, Map<String, ?> params) throws PlannerDiedException {
    long id = lastId.incrementAndGet();
    try {
      return result(await(send(id, method, params), method));
    } catch (InterruptedException e) {
      throw interrupted(method);
    } catch (ExecutionException e) {
      throw new PlannerDiedException(e.getCause().getMessage(), true);
    } finally {
      pending.remove(id);
    }
  }

  /** Makes a request whose failure does no harm, and waits for it even if interrupted. */
  void callAtEnd(String method, Map<String, ?> params) {
    boolean interrupted = Thread.interrupted();
    try {
      long id = lastId.incrementAndGet();
      send(id, method, params).get(SECONDS_TO_END, TimeUnit.SECONDS);
    } catch (InterruptedException e) {
      interrupted = true;
    } catch (PlannerDiedException | ExecutionException | TimeoutException e) {
      // The leases of a planner that is dead or stuck end by their time limit.
    } finally {
      if (interrupted) {
        Thread.currentThread().interrupt();
      }
    }
  }

  private CompletableFuture<JsonNode> send(long id, String method, Map<String, ?> params)
      throws PlannerDiedException {
    awaitStart(method);
    CompletableFuture<JsonNode> answer = new CompletableFuture<>();
    pending.put(id, answer);
    // The thread that reads fails what is pending after it has set this.
    if (death != null) {
      pending.remove(id);
      throw new PlannerDiedException(death, false);
    }
    requests.write(id, method, params);
    return answer;
  }

  private void awaitStart(String method) throws PlannerDiedException {
    try {
      await(started, method);
    } catch (InterruptedException e) {
      throw interrupted(method);
    } catch (ExecutionException e) {
      if (e.getCause() instanceof PlannerDiedException died) {
        throw died;
      }
      throw (EmbedlogException) e.getCause();
    }
  }

  /** Waits for the planner; kills it if it is silent for too long, which fails the result. */
  private <T> T await(CompletableFuture<T> result, String method)
      throws InterruptedException, ExecutionException {
    long timeoutMillis = Planner.timeoutMillis();
    long linesBefore = lines.get();
    int silentWaits = 0;
    for (long waits = 1; ; waits++) {
      try {
        return result.get(Math.max(timeoutMillis / WAITS, 1), TimeUnit.MILLISECONDS);
      } catch (TimeoutException e) {
        // What a script prints before the planner starts is no sign of it.
        boolean silent = lines.get() == linesBefore || !started.isDone();
        silentWaits = silent ? silentWaits + 1 : 0;
        linesBefore = lines.get();
      }
      if (silentWaits == WAITS) {
        String problem = started.isDone() ? "gave no sign of life for " : "did not start within ";
        kill(problem + timeoutMillis / 1000 + " s, and was killed");
      } else if (waits % WAITS == 0) {
        LOGGER.warn(
            "The planner, process {}, is alive, but has not answered {} for {} s",
            process.pid(),
            method,
            waits * timeoutMillis / WAITS / 1000);
      }
      if (started.isDone()) {
        // Id 0 is that of no request, so the answer is dropped.
        requests.write(0, "ping", Map.of());
      }
    }
  }

  private void kill(String reason) {
    reasonToKill = reason;
    // A script that started the Python must not leave it behind with the pipes.
    process.descendants().forEach(ProcessHandle::destroyForcibly);
    process.destroyForcibly();
  }

  private static JsonNode result(JsonNode answer) {
    JsonNode error = answer.get("error");
    if (error != null) {
      String type = error.get("type").asText();
      String message = error.get("message").asText();
      if (error.get("refused").asBoolean()) {
        throw RefusedException.of(type, message);
      }
      throw new EmbedlogException(type, message);
    }
    return answer.get("result");
  }

  /** Returns the exception that Spark takes for an interruption, not for a failure. */
  private static UncheckedIOException interrupted(String method) {
    Thread.currentThread().interrupt();
    String message = "Interrupted while the planner was asked for " + method;
    return new UncheckedIOException(new InterruptedIOException(message));
  }

  private void readAnswers() {
    InputStreamReader characters =
        new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8);
    try (BufferedReader lines = new BufferedReader(characters)) {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        accept(line);
      }
    } catch (IOException e) {
      process.destroyForcibly();
    } finally {
      end();
    }
  }

  private void accept(String line) {
    lines.incrementAndGet();
    JsonNode message = parse(line);
    boolean isFirst = !started.isDone();
    if (!message.has(isFirst ? "version" : "id")) {
      // Printed by a script that starts the Python, for example.
      if (!line.isBlank()) {
        System.err.println(line);
      }
    } else if (isFirst) {
      checkVersion(message.get("version").asText());
    } else {
      CompletableFuture<JsonNode> waiting = pending.remove(message.get("id").asLong());
      if (waiting != null) {
        waiting.complete(message);
      }
    }
  }

  private static JsonNode parse(String line) {
    try {
      return Json.parse(line);
    } catch (JsonProcessingException e) {
      return MissingNode.getInstance();
    }
  }

  private void checkVersion(String version) {
    // Classes outside of a jar have no version.
    String expected = PlannerProcess.class.getPackage().getImplementationVersion();
    if (expected == null || expected.equals(version)) {
      started.complete(null);
      return;
    }
    String problem =
        String.format(
            "The jar is of embedlog %s, but the Python %s has embedlog %s. "
                + "Install the same version of both, or set spark.pyspark.python.",
            expected, python, version);
    started.completeExceptionally(new EmbedlogException("SparkSetupError", problem));
    close();
  }

  /** Tells the threads that wait why there will be no answer. */
  private void end() {
    close();
    String command = python + " -m " + MODULE;
    int status = exitStatus();
    String how = "ended with exit status " + status + ": " + errors.lastLine();
    death = command + " " + (reasonToKill == null ? how : reasonToKill);
    PlannerDiedException died = new PlannerDiedException(death, false);
    if (reasonToKill == null && status < FIRST_SIGNAL_STATUS) {
      // Another one would end in the same way.
      started.completeExceptionally(new EmbedlogException("SparkSetupError", death + ". " + TODO));
    }
    started.completeExceptionally(died);
    for (CompletableFuture<JsonNode> answer : pending.values()) {
      answer.completeExceptionally(died);
    }
  }

  private int exitStatus() {
    try {
      if (!process.waitFor(SECONDS_TO_END, TimeUnit.SECONDS)) {
        kill("closed its output but did not end, and was killed");
      }
      errors.join(TimeUnit.SECONDS.toMillis(SECONDS_TO_END));
      return process.waitFor();
    } catch (InterruptedException e) {
      throw new IllegalStateException("No thread interrupts the one that reads answers", e);
    }
  }
}
