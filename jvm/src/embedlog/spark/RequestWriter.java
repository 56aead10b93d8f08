package embedlog.spark;

import java.io.BufferedWriter;
import java.io.IOException;
import java.io.OutputStream;
import java.io.OutputStreamWriter;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.RejectedExecutionException;

/**
 * Writes requests to a planner, from a thread of its own: a planner that is stopped reads nothing,
 * and a thread of Spark that waits for a full pipe could not be interrupted.
 *
 * <p>Errors are left to the thread that reads the answers: if the pipe is broken, the process is
 * ending, and so is its output.
 */
final class RequestWriter {
  private final Writer stdin;
  private final ExecutorService thread =
      Executors.newSingleThreadExecutor(
          task -> {
            Thread thread = new Thread(task, "embedlog-planner-requests");
            thread.setDaemon(true);
            return thread;
          });

  RequestWriter(OutputStream stdin) {
    this.stdin = new BufferedWriter(new OutputStreamWriter(stdin, StandardCharsets.UTF_8));
  }

  /** Writes a request after those before it, without waiting for that. */
  void write(long id, String method, Map<String, ?> params) {
    String request = Json.write(Map.of("id", id, "method", method, "params", params));
    execute(
        () -> {
          stdin.write(request + "\n");
          stdin.flush();
        });
  }

  /** Ends the planner's input after the requests so far. */
  void close() {
    execute(stdin::close);
    thread.shutdown();
  }

  /** A step that fails if the pipe is broken. */
  @FunctionalInterface
  private interface Step {
    void run() throws IOException;
  }

  private void execute(Step step) {
    try {
      thread.execute(
          () -> {
            try {
              step.run();
            } catch (IOException e) {
              // As the class says.
            }
          });
    } catch (RejectedExecutionException e) {
      // Closed: the process ends, which fails the requests that were not answered.
    }
  }
}
