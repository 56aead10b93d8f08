package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.util.HashMap;
import java.util.Map;

/**
 * What the tasks of a write need to know, as the planner says.
 *
 * @param root the directory of the log
 * @param directory the directory of the staged files, in the log's
 * @param topic the topic of all rows; null if a column says it
 * @param targets the topics that can be written to, by name
 * @param repeatable whether a publication that was interrupted may be repeated, because the log
 *     notes which version of which application it was
 */
record WritePlan(
    String root,
    String directory,
    String topic,
    Map<String, TargetTopic> targets,
    boolean repeatable)
    implements Serializable {

  /** Reads the planner's answer; {@code QueryPlanner.plan_write} writes it. */
  static WritePlan parse(JsonNode plan) {
    Map<String, TargetTopic> targets = new HashMap<>();
    for (JsonNode target : plan.get("targets")) {
      String name = target.get(0).asText();
      targets.put(
          name,
          new TargetTopic(
              name,
              target.get(1).asLong(),
              target.get(2).asInt(),
              target.get(3).asLong(),
              target.get(4).asLong(),
              target.get(5).asText()));
    }
    JsonNode topic = plan.get("topic");
    return new WritePlan(
        plan.get("root").asText(),
        plan.get("directory").asText(),
        topic.isNull() ? null : topic.asText(),
        targets,
        plan.get("repeatable").asBoolean());
  }

  /**
   * Returns a topic.
   *
   * @throws EmbedlogException if there was none of this name when the write began
   */
  TargetTopic target(String name) {
    TargetTopic target = targets.get(name);
    if (target == null) {
      throw new EmbedlogException(
          "UnknownTopicOrPartitionError",
          "There is no such topic [" + name + "]. Create it before the write starts.");
    }
    return target;
  }
}
