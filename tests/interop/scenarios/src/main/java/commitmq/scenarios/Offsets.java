package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageQueue;

/** Where consumers begin: their group's offsets, resets, and the rules for new groups. */
final class Offsets {
    private static final String EARLY = "20000101000000";
    private static final String LATE = "20990101000000";

    private Offsets() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("offsets_resume", Offsets::resume);
        found.put("offsets_reset_before_start", Offsets::resetBeforeStart);
        found.put("offsets_reset_while_running", Offsets::resetWhileRunning);
        found.put("offsets_of_new_groups", Offsets::newGroups);
        return found;
    }

    private static Object resume(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        for (int number = 0; number < 10; number++) {
            stage.sendTo(topic, number % 2, "first " + number);
        }
        Inbox first = new Inbox();
        DefaultMQPushConsumer consumer = stage.push("g", topic, "*", first);
        first.await(10);
        consumer.shutdown();
        for (int number = 0; number < 4; number++) {
            stage.sendTo(topic, number % 2, "second " + number);
        }
        Inbox second = new Inbox();
        stage.push("g", topic, "*", second);
        return List.of(Seen.bodies(first.messages()), second.await(4).lines());
    }

    private static Map<Integer, Long> reset(Stage stage, String topic, String group, long timestamp) throws Exception {
        Map<Integer, Long> found = new TreeMap<>();
        Map<MessageQueue, Long> table =
            stage.api().invokeBrokerToResetOffset(stage.address, topic, stage.own(group), timestamp, true, Stage.CALL_MS);
        table.forEach((queue, offset) -> found.put(queue.getQueueId(), offset));
        return found;
    }

    private static Object resetBeforeStart(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        stage.sendTo(topic, 0, "early 0");
        stage.sendTo(topic, 1, "early 1");
        Inbox first = new Inbox();
        DefaultMQPushConsumer consumer = stage.push("g", topic, "*", first);
        first.await(2);
        consumer.shutdown();
        Thread.sleep(50);
        long middle = System.currentTimeMillis();
        Thread.sleep(50);
        stage.sendTo(topic, 0, "late 0");
        stage.sendTo(topic, 1, "late 1");
        stage.stored(topic, 4);
        List<Object> found = new ArrayList<>();
        found.add(reset(stage, topic, "g", 0));
        found.add(reset(stage, topic, "g", -1));
        found.add(reset(stage, topic, "g", middle));
        Inbox second = new Inbox();
        stage.push("g", topic, "*", second);
        found.add(Seen.bodies(second.await(2).messages()));
        return found;
    }

    private static Object resetWhileRunning(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        stage.send(topic, "0", "1", "2");
        Inbox inbox = new Inbox();
        stage.push("g", topic, "*", inbox);
        inbox.await(3);
        Thread.sleep(1_000);
        Object table = reset(stage, topic, "g", 0);
        inbox.await(6);
        return List.of(table, Seen.bodies(inbox.messages()));
    }

    /** A young topic: RocketMQ's rules differ for one whose first messages are gone. */
    private static Object newGroups(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        stage.send(topic, "0", "1");
        stage.stored(topic, 2);
        Map<String, Inbox> inboxes = new LinkedHashMap<>();
        begin(stage, inboxes, topic, "first", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, null);
        begin(stage, inboxes, topic, "last", ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET, null);
        begin(stage, inboxes, topic, "early", ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, EARLY);
        begin(stage, inboxes, topic, "late", ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, LATE);
        Thread.sleep(3_000);
        stage.send(topic, "2");
        Map<String, Object> found = new LinkedHashMap<>();
        for (Map.Entry<String, Inbox> one : inboxes.entrySet()) {
            found.put(one.getKey(), Seen.bodies(one.getValue().await(3).messages()));
        }
        return found;
    }

    private static void begin(Stage stage, Map<String, Inbox> inboxes, String topic, String word, ConsumeFromWhere where,
        String timestamp) throws Exception {
        Inbox inbox = new Inbox();
        inboxes.put(word, inbox);
        DefaultMQPushConsumer consumer = stage.consumer(word);
        consumer.setConsumeFromWhere(where);
        if (timestamp != null) {
            consumer.setConsumeTimestamp(timestamp);
        }
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
    }
}
