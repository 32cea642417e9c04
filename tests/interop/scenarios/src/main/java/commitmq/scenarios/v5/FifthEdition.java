package commitmq.scenarios.v5;

import commitmq.scenarios.Edition;
import commitmq.scenarios.Scenario;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/** The clients of 5.4, and what 4.9 has not. */
public final class FifthEdition implements Edition {
    @Override
    public void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    @Override
    public Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.putAll(Timers.scenarios());
        found.putAll(Pops.scenarios());
        found.putAll(Forms.scenarios());
        return found;
    }
}
