package embedlog.spark;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.Deque;

/**
 * Prints what a Python process writes to stderr, as Spark does for its workers, and keeps the end
 * of it: if the process dies, that says why.
 */
final class PythonErrors extends Thread {
  private static final int KEPT_LINES = 10;

  private final InputStream stderr;
  private final Deque<String> lastLines = new ArrayDeque<>();

  PythonErrors(InputStream stderr) {
    super("embedlog-planner-stderr");
    this.stderr = stderr;
    setDaemon(true);
  }

  @Override
  public void run() {
    InputStreamReader characters = new InputStreamReader(stderr, StandardCharsets.UTF_8);
    try (BufferedReader lines = new BufferedReader(characters)) {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        System.err.println(line);
        keep(line);
      }
    } catch (IOException e) {
      keep(e.toString());
    }
  }

  private synchronized void keep(String line) {
    if (line.isBlank()) {
      return;
    }
    lastLines.addLast(line.strip());
    if (lastLines.size() > KEPT_LINES) {
      lastLines.removeFirst();
    }
  }

  /** Returns the last line, which in a traceback is the error. */
  synchronized String lastLine() {
    return lastLines.isEmpty() ? "it printed no error" : lastLines.getLast();
  }
}
