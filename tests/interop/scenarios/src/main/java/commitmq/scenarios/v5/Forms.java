package commitmq.scenarios.v5;

import commitmq.scenarios.Inbox;
import commitmq.scenarios.Scenario;
import commitmq.scenarios.Seen;
import commitmq.scenarios.Stage;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.message.Message;

/** Forms of requests that only 5.x has: other compressions, and heartbeats of the second version. */
final class Forms {
    private Forms() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("send_other_compressions", Forms::compressions);
        found.put("push_heartbeat_2", Forms::heartbeats);
        return found;
    }

    private static Object compressions(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        for (CompressionType type : CompressionType.values()) {
            DefaultMQProducer producer = new DefaultMQProducer(stage.own(type.name()));
            stage.client(producer, producer::shutdown);
            producer.setCompressType(type);
            producer.start();
            producer.send(new Message(topic, type.name(), Stage.bytes("0123456789abcdef".repeat(1_000))));
        }
        return Seen.lines(stage.stored(topic, CompressionType.values().length));
    }

    private static Object heartbeats(Stage stage) throws Exception {
        String first = stage.topic("first", 1);
        String second = stage.topic("second", 1);
        stage.send(second, "early");
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.setUseHeartbeatV2(true);
        consumer.subscribe(first, "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        stage.send(first, "one");
        inbox.await(1);
        Thread.sleep(2_000);  // the heartbeats leave the subscriptions out now
        stage.send(first, "two");
        inbox.await(2);
        consumer.subscribe(second, "*");
        inbox.await(3);
        return inbox.lines();
    }
}
