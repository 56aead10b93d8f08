package embedlog;

import java.io.File;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;

/**
 * A process `embedlog serve` on a new log; SERVER is its command, SERVER_OUTPUT gets its output.
 */
public class EmbedlogServer {
  private static final int START_SECONDS = 60;

  private Process process;
  private Path directory;
  private int port;
  private boolean createsTopics = true;

  /** Have it not create topics that clients ask for. */
  public void disableTopicCreation() {
    createsTopics = false;
  }

  /** Start it, again with the same log at the same port; return once it accepts connections. */
  public void start() {
    try {
      if (directory == null) {
        directory = Files.createTempDirectory("kafka-suite");
        try (ServerSocket free = new ServerSocket(0)) {
          port = free.getLocalPort();
        }
      }
      List<String> command = new ArrayList<>(List.of(System.getenv("SERVER").split(" ")));
      command.add(directory.resolve("log").toString());
      command.add("--listen");
      command.add(bootstrapServers());
      if (!createsTopics) {
        command.add("--no-auto-create-topics");
      }
      File output = new File(System.getenv("SERVER_OUTPUT"));
      process =
          new ProcessBuilder(command)
              .redirectErrorStream(true)
              .redirectOutput(ProcessBuilder.Redirect.appendTo(output))
              .start();
      awaitConnection();
    } catch (IOException | InterruptedException error) {
      throw new IllegalStateException(error);
    }
  }

  private void awaitConnection() throws InterruptedException {
    long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(START_SECONDS);
    while (System.nanoTime() < until) {
      try (Socket socket = new Socket()) {
        socket.connect(new InetSocketAddress("127.0.0.1", port));
        return;
      } catch (IOException error) {
        Thread.sleep(20);
      }
    }
    throw new IllegalStateException("the server does not listen after " + START_SECONDS + " s");
  }

  public int port() {
    return port;
  }

  public String bootstrapServers() {
    return "127.0.0.1:" + port;
  }

  /** Kill it, if it was started; return once its port is free. */
  public void stop() {
    if (process != null) {
      try {
        process.destroyForcibly().waitFor();
      } catch (InterruptedException error) {
        throw new IllegalStateException(error);
      }
    }
  }
}
