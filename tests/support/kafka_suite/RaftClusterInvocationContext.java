package org.apache.kafka.common.test.junit;

import embedlog.EmbedlogBroker;
import embedlog.EmbedlogServer;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.function.Supplier;
import kafka.server.ControllerServer;
import kafka.server.KafkaBroker;
import org.apache.kafka.common.network.ListenerName;
import org.apache.kafka.common.test.ClusterInstance;
import org.apache.kafka.common.test.api.ClusterConfig;
import org.apache.kafka.common.test.api.Type;
import org.apache.kafka.server.fault.FaultHandlerException;
import org.junit.jupiter.api.extension.AfterEachCallback;
import org.junit.jupiter.api.extension.BeforeEachCallback;
import org.junit.jupiter.api.extension.Extension;
import org.junit.jupiter.api.extension.TestTemplateInvocationContext;
import org.opentest4j.TestAbortedException;

/**
 * Takes the place of Kafka's own class, first on the class path: Kafka's tests then run on
 * `embedlog serve` instead of brokers in their own process.
 *
 * <p>However many brokers a test asks for, there is one server. What stops or starts a broker is
 * aborted unless it asked for one, which JUnit reports as skipped, with the reason.
 */
public class RaftClusterInvocationContext implements TestTemplateInvocationContext {
  private final String name;
  private final ClusterConfig config;
  private final boolean isCombined;

  public RaftClusterInvocationContext(String name, ClusterConfig config, boolean isCombined) {
    this.name = name;
    this.config = config;
    this.isCombined = isCombined;
  }

  /** Kafka's own class has it, and its tests call it. */
  static void waitForCondition(Supplier<Boolean> condition, String message)
      throws InterruptedException {
    for (int i = 0; i < 300; i++) {
      if (condition.get()) {
        return;
      }
      Thread.sleep(50);
    }
    throw new AssertionError(message);
  }

  @Override
  public String getDisplayName(int index) {
    return name + " [" + index + "]";
  }

  @Override
  public List<Extension> getAdditionalExtensions() {
    Server server = new Server(config);
    BeforeEachCallback before =
        context -> {
          if (isCombined && config.clusterTypes().contains(Type.KRAFT)) {
            throw new TestAbortedException("once is enough: there is no controller");
          }
          if (config.isAutoStart()) {
            server.start();
          }
        };
    AfterEachCallback after = context -> server.stop();
    return List.of(before, after, new ClusterInstanceParameterResolver(server));
  }

  private static final class Server implements ClusterInstance {
    private static final int CONTROLLER = 3000;
    private static final String SHARE_STATE_PARTITIONS =
        "share.coordinator.state.topic.num.partitions";

    private final ClusterConfig config;
    private final EmbedlogServer server = new EmbedlogServer();
    private final KafkaBroker broker;
    private final ControllerServer controller = EmbedlogBroker.controllerOf(server);
    private boolean isStarted;
    private boolean isStopped;

    Server(ClusterConfig config) {
      this.config = config;
      broker = EmbedlogBroker.of(server, config.serverProperties(), config.numBrokers());
    }

    @Override
    public Type type() {
      return Type.CO_KRAFT;
    }

    @Override
    public Map<Integer, KafkaBroker> brokers() {
      return Map.of(0, broker);
    }

    @Override
    public Map<Integer, ControllerServer> controllers() {
      return Map.of(CONTROLLER, controller);
    }

    @Override
    public ClusterConfig config() {
      return config;
    }

    @Override
    public Set<Integer> controllerIds() {
      return Set.of(CONTROLLER);
    }

    @Override
    public ListenerName clientListener() {
      return ListenerName.normalised("EXTERNAL");
    }

    @Override
    public ListenerName controllerListenerName() {
      return ListenerName.normalised("CONTROLLER");
    }

    @Override
    public String bootstrapServers() {
      return server.bootstrapServers();
    }

    @Override
    public String bootstrapControllers() {
      throw new TestAbortedException("a controller");
    }

    @Override
    public String clusterId() {
      throw new TestAbortedException("the id that the test gave the cluster");
    }

    @Override
    public Optional<FaultHandlerException> firstFatalException() {
      return Optional.empty();
    }

    @Override
    public Optional<FaultHandlerException> firstNonFatalException() {
      return Optional.empty();
    }

    @Override
    public void start() {
      if (isStarted) {
        return;
      }
      isStarted = true;
      if ("false".equals(config.serverProperties().get("auto.create.topics.enable"))) {
        server.disableTopicCreation();
      }
      server.start();
      String partitions = config.serverProperties().get(SHARE_STATE_PARTITIONS);
      if (partitions != null) {
        EmbedlogBroker.addShareGroupState(server, Integer.parseInt(partitions));
      }
    }

    @Override
    public boolean started() {
      return isStarted;
    }

    @Override
    public void stop() {
      server.stop();
      isStopped = true;
    }

    @Override
    public boolean stopped() {
      return isStopped;
    }

    @Override
    public void shutdownBroker(int brokerId) {
      broker.shutdown();
    }

    @Override
    public void startBroker(int brokerId) {
      broker.startup();
    }

    @Override
    public void waitForReadyBrokers() {}

    @Override
    public void waitTopicDeletion(String topic) throws InterruptedException {
      waitForCondition(() -> !broker.metadataCache().contains(topic), topic + " is there still");
    }

    @Override
    public void ensureConsistentMetadata(
        Collection<KafkaBroker> brokers, Collection<ControllerServer> controllers) {}
  }
}
