package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.Map;

/**
 * A streaming query as the planner knows it. It keeps here what a planner cannot know that takes
 * over from one that was killed.
 */
final class PlannerStream {
  private final Planner planner;
  private final Map<String, String> options;

  /** The lease, and what the query must not forget: see {@code QueryPlanner.open_stream}. */
  private final Map<String, JsonNode> state = new HashMap<>();

  /** The process where the stream is open. */
  private PlannerProcess process;

  private JsonNode opened;

  PlannerStream(Planner planner, Map<String, String> options) {
    this.planner = planner;
    this.options = options;
  }

  /** Returns the limit of a micro-batch, as a word and a number; null if there is none. */
  synchronized JsonNode limit() {
    planner.repeatIfPlannerDies(this::open);
    return opened.get("limit");
  }

  /** Makes a request about this stream, and returns its result. */
  synchronized JsonNode request(String method, Map<String, ?> params) {
    return planner.repeatIfPlannerDies(
        process -> {
          Map<String, Object> withStream = new HashMap<>(params);
          withStream.put("stream", open(process).get("stream"));
          return process.call(method, withStream);
        });
  }

  /** Makes a request whose result is to be passed to the next planner under this name. */
  synchronized JsonNode requestAndKeep(String method, String name) {
    JsonNode result = request(method, Map.of());
    state.put(name, result);
    return result;
  }

  /** Releases the lease; does nothing if the planner is gone, or was never asked. */
  synchronized void close() {
    if (process != null && process.death() == null) {
      process.callAtEnd("close_stream", Map.of("stream", opened.get("stream")));
    }
    process = null;
  }

  private JsonNode open(PlannerProcess current) throws PlannerDiedException {
    if (process != current) {
      opened = current.call("open_stream", Map.of("options", options, "state", state));
      state.put("lease", opened.get("lease"));
      process = current;
    }
    return opened;
  }
}
