package commitmq.scenarios;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** What traces say, in RocketMQ's topic and in one of the scenario's own. */
final class Traces {
    private static final String USUAL = "RMQ_SYS_TRACE_TOPIC";
    /** Fields that hold a clock, an id, a duration or an address, by the kind of record. */
    private static final Map<String, Set<Integer>> CHANGING = Map.of(
        "Pub", Set.of(1, 5, 8, 10, 12), "SubBefore", Set.of(1, 4, 5), "SubAfter", Set.of(1, 2, 3, 7));

    private Traces() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("traces", stage -> traces(stage, USUAL));
        found.put("traces_in_own_topic", stage -> traces(stage, stage.topic("traces", 1)));
        return found;
    }

    private static Object traces(Stage stage, String traceTopic) throws Exception {
        String topic = stage.topic("t", 1);
        DefaultMQProducer producer = new DefaultMQProducer(stage.own("tracing"), true, traceTopic);
        stage.client(producer, producer::shutdown);
        producer.start();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(stage.own("traced"), true, traceTopic);
        stage.client(consumer, consumer::shutdown);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        Inbox inbox = new Inbox();
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        producer.send(new Message(topic, "tag", "key", Stage.bytes("traced")));
        inbox.await(1);
        List<String> records = new ArrayList<>();
        Stage.await(() -> {
            records.clear();
            for (MessageExt trace : stage.stored(traceTopic, 1)) {
                for (String record : new String(trace.getBody(), StandardCharsets.UTF_8).split("\u0002")) {
                    records.add(record);
                }
            }
            // The record of a consumer's end names the group only, that of its begin too.
            records.removeIf(record -> !record.contains(stage.own("")));
            return records.size() >= 3;
        }, "three records", () -> records);
        List<List<String>> found = new ArrayList<>();
        for (String record : records) {
            List<String> fields = new ArrayList<>();
            String[] parts = record.split("\u0001", -1);
            for (int at = 0; at < parts.length; at++) {
                boolean changing = CHANGING.getOrDefault(parts[0], Set.of()).contains(at);
                fields.add(changing ? "…" : parts[at]);
            }
            found.add(fields);
        }
        found.sort(java.util.Comparator.comparing(fields -> fields.get(0)));
        return found;
    }
}
