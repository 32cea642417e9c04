package commitmq.scenarios.v4;

import commitmq.scenarios.Edition;
import commitmq.scenarios.Scenario;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/** The clients of 4.9. */
public final class FourthEdition implements Edition {
    @Override
    public void broadcast(DefaultMQPushConsumer consumer) {
        consumer.setMessageModel(MessageModel.BROADCASTING);
    }

    @Override
    public Map<String, Scenario> scenarios() {
        return Map.of();
    }
}
