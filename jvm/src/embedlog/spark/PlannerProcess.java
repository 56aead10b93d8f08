package embedlog.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import java.io.BufferedReader;
import java.io.BufferedWriter;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.InterruptedIOException;
import java.io.OutputStreamWriter;
import java.io.UncheckedIOException;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;

/**
 * One Python process that plans queries, and the pipes to it; see {@code embedlog.spark.planner}.
 *
 * <p>Any thread may make requests: one thread reads all answers and passes each to the thread that
 * waits for it. A thread that is interrupted leaves alone, and its answer is dropped.
 */
final class PlannerProcess {
  private static final String MODULE = "embedlog.spark.planner";
  private static final String TODO =
      "Set spark.pyspark.python, or PYSPARK_PYTHON, to a Python with embedlog before the session"
          + " starts.";
  private static final long SECONDS_TO_END = 10;

  private final String python;
  private final Process process;
  private final PythonErrors errors;
  private final Writer requests;
  private final AtomicLong lastId = new AtomicLong();
  private final Map<Long, CompletableFuture<JsonNode>> pending = new ConcurrentHashMap<>();

  /** Completed when the planner has told its version, or cannot be used. */
  private final CompletableFuture<Void> started = new CompletableFuture<>();

  /** Why there will be no more answers, once the process has ended. */
  private volatile String death;

  private PlannerProcess(String python, Process process) {
    this.python = python;
    this.process = process;
    errors = new PythonErrors(process.getErrorStream());
    requests =
        new BufferedWriter(
            new OutputStreamWriter(process.getOutputStream(), StandardCharsets.UTF_8));
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

  /** Whether the process has ended. */
  boolean isDead() {
    return death != null;
  }

  /** Has the process release its leases and end, once it has answered all requests. */
  void close() {
    try {
      synchronized (requests) {
        requests.close();
      }
    } catch (IOException e) {
      process.destroyForcibly();
    }
  }

  /**
   * Makes a request, and waits for the answer as long as that takes.
   *
   * @throws EmbedlogException if the answer is an error, or the Python has no planner
   * @throws PlannerDiedException if the process ends before it answers
   * @throws UncheckedIOException if the thread is interrupted; Spark stops a query so
   */
  JsonNode call(String method, Map<String, ?> params) throws PlannerDiedException {
    long id = lastId.incrementAndGet();
    CompletableFuture<JsonNode> answer = send(id, method, params);
    try {
      return result(answer.get());
    } catch (InterruptedException e) {
      throw interrupted(method);
    } catch (ExecutionException e) {
      throw new PlannerDiedException(e.getCause().getMessage());
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
      throw new PlannerDiedException(death);
    }
    String request = Json.write(Map.of("id", id, "method", method, "params", params));
    try {
      synchronized (requests) {
        requests.write(request + "\n");
        requests.flush();
      }
    } catch (IOException e) {
      // The process is ending, and so is its output: then the thread that reads fails the answer.
    }
    return answer;
  }

  private void awaitStart(String method) throws PlannerDiedException {
    try {
      started.get();
    } catch (InterruptedException e) {
      throw interrupted(method);
    } catch (ExecutionException e) {
      throw (EmbedlogException) e.getCause();
    }
  }

  private static JsonNode result(JsonNode answer) {
    JsonNode error = answer.get("error");
    if (error != null) {
      throw new EmbedlogException(error.get("type").asText(), error.get("message").asText());
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
    JsonNode message;
    try {
      message = Json.parse(line);
    } catch (JsonProcessingException e) {
      // Printed by a script that starts the Python, for example.
      System.err.println(line);
      return;
    }
    if (!started.isDone()) {
      checkVersion(message.path("version").asText());
    } else {
      CompletableFuture<JsonNode> waiting = pending.remove(message.path("id").asLong());
      if (waiting != null) {
        waiting.complete(message);
      }
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
    String status = exitStatus();
    death = command + " ended with " + status + ": " + errors.lastLine();
    started.completeExceptionally(new EmbedlogException("SparkSetupError", death + ". " + TODO));
    for (CompletableFuture<JsonNode> answer : pending.values()) {
      answer.completeExceptionally(new PlannerDiedException(death));
    }
  }

  private String exitStatus() {
    try {
      if (!process.waitFor(SECONDS_TO_END, TimeUnit.SECONDS)) {
        process.destroyForcibly();
      }
      errors.join(TimeUnit.SECONDS.toMillis(SECONDS_TO_END));
      return "exit status " + process.waitFor();
    } catch (InterruptedException e) {
      return "no exit status";
    }
  }
}
