package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Push consumers: what they get, and in which order. */
final class Pushes {
    private Pushes() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("push_concurrent", Pushes::concurrent);
        found.put("push_ordered", Pushes::ordered);
        found.put("push_broadcast", Pushes::broadcast);
        found.put("push_tags", Pushes::tags);
        found.put("push_sql", Pushes::sql);
        found.put("push_several_topics", Pushes::severalTopics);
        found.put("push_batches", Pushes::batches);
        found.put("push_ordered_suspend", Pushes::orderedSuspend);
        found.put("push_subscription_changes", Pushes::subscriptionChanges);
        return found;
    }

    private static Object concurrent(Stage stage) throws Exception {
        String topic = stage.topic("t", 4);
        for (int number = 0; number < 10; number++) {
            stage.sendTo(topic, number % 4, "before " + number);
        }
        Inbox inbox = new Inbox();
        stage.push("g", topic, "*", inbox);
        inbox.await(10);
        for (int number = 0; number < 10; number++) {
            stage.sendTo(topic, number % 4, "after " + number);
        }
        return inbox.await(20).lines();
    }

    private static Object ordered(Stage stage) throws Exception {
        String topic = stage.topic("t", 3);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.orderly());
        consumer.start();
        for (int number = 0; number < 30; number++) {
            int order = number;
            stage.producer().send(new Message(topic, Stage.bytes("step " + number)),
                (queues, message, argument) -> queues.get(order % queues.size()), null);
        }
        return byQueue(inbox.await(30));
    }

    private static Map<Integer, List<String>> byQueue(Inbox inbox) {
        Map<Integer, List<String>> found = new TreeMap<>();
        for (MessageExt message : inbox.messages()) {
            found.computeIfAbsent(message.getQueueId(), queue -> new ArrayList<>())
                .add(Seen.body(message.getBody()) + ", try " + message.getReconsumeTimes());
        }
        return found;
    }

    private static Object broadcast(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        List<Inbox> inboxes = List.of(new Inbox(), new Inbox(message -> false, 0));
        stage.sendTo(topic, 0, "before");
        for (Inbox inbox : inboxes) {
            DefaultMQPushConsumer consumer = stage.consumer("g");
            stage.edition.broadcast(consumer);
            consumer.subscribe(topic, "*");
            consumer.registerMessageListener(inbox.concurrently());
            consumer.start();
        }
        for (Inbox inbox : inboxes) {
            inbox.await(1);
        }
        stage.sendTo(topic, 1, "after 1", "after 2");
        List<Object> found = new ArrayList<>();
        for (Inbox inbox : inboxes) {
            found.add(Seen.bodies(inbox.await(3).messages()));  // a failed one does not come again
        }
        return found;
    }

    private static Object tags(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        Inbox two = new Inbox();
        Inbox one = new Inbox();
        stage.push("two", topic, "A || B", two);
        stage.push("one", topic, "C", one);
        for (String tag : new String[] {"A", "B", "C", "a", "AB", null, "A", "C"}) {
            stage.producer().send(new Message(topic, tag, Stage.bytes("tag " + tag)));
        }
        return List.of(sortedBodies(two.await(3)), sortedBodies(one.await(2)));
    }

    private static List<String> sortedBodies(Inbox inbox) {
        return Seen.bodies(inbox.messages()).stream().sorted().toList();
    }

    private static Object sql(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        List<String> expressions = List.of(
            "a > 3 AND region IN ('eu', 'us')", "a BETWEEN 2 AND 4", "region IS NULL OR TAGS = 'tag1'", "NOT (a <> 5)");
        List<Inbox> inboxes = new ArrayList<>();
        for (int number = 0; number < expressions.size(); number++) {
            Inbox inbox = new Inbox();
            DefaultMQPushConsumer consumer = stage.consumer("g" + number);
            consumer.subscribe(topic, MessageSelector.bySql(expressions.get(number)));
            consumer.registerMessageListener(inbox.concurrently());
            consumer.start();
            inboxes.add(inbox);
        }
        for (int number = 0; number < 8; number++) {
            Message message = new Message(topic, "tag" + number % 3, Stage.bytes("a " + number));
            message.putUserProperty("a", String.valueOf(number));
            if (number % 4 != 0) {
                message.putUserProperty("region", number % 2 == 0 ? "eu" : "asia");
            }
            stage.producer().send(message);
        }
        stage.producer().send(new Message(topic, "tag0", Stage.bytes("without a")));
        List<Object> found = new ArrayList<>();
        int[] counts = {1, 3, 5, 1};
        for (int number = 0; number < counts.length; number++) {
            found.add(sortedBodies(inboxes.get(number).await(counts[number])));
        }
        return found;
    }

    private static Object severalTopics(Stage stage) throws Exception {
        String first = stage.topic("first", 2);
        String second = stage.topic("second", 1);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.subscribe(first, "A");
        consumer.subscribe(second, "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        for (String topic : List.of(first, second)) {
            for (String tag : List.of("A", "B")) {
                stage.producer().send(new Message(topic, tag, Stage.bytes(tag)), Stage.queue(topic, 0));
            }
        }
        return inbox.await(3).lines();
    }

    /** Several messages at a time; those behind the index that the listener sets come again. */
    private static Object batches(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        for (int number = 0; number < 6; number++) {
            stage.send(topic, "body " + number);
        }
        List<MessageExt> got = java.util.Collections.synchronizedList(new ArrayList<>());
        List<Integer> sizes = java.util.Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.setConsumeMessageBatchMaxSize(10);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((List<MessageExt> batch,
            org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext context) -> {
            got.addAll(batch);
            sizes.add(batch.size());
            context.setDelayLevelWhenNextConsume(1);
            if (batch.size() == 6) {
                context.setAckIndex(3);
            }
            return org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Stage.await(() -> got.size() >= 8, "8 messages", () -> Seen.bodies(got));
        Thread.sleep(Stage.MOMENT_MS);
        List<Integer> times = Seen.sorted(got).stream().map(MessageExt::getReconsumeTimes).toList();
        return List.of(sizes.get(0), Seen.bodies(got), times);
    }

    private static Object orderedSuspend(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        Inbox inbox = new Inbox(message -> !Seen.body(message.getBody()).equals("1") || message.getReconsumeTimes() >= 2, 0);
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.orderly());
        for (String body : List.of("0", "1", "2", "3")) {
            stage.sendTo(topic, 0, body);
        }
        stage.sendTo(topic, 1, "other");
        consumer.start();
        return byQueue(inbox.await(7));
    }

    /** Topics are added and taken away while the consumer runs. */
    private static Object subscriptionChanges(Stage stage) throws Exception {
        String first = stage.topic("first", 1);
        String second = stage.topic("second", 1);
        stage.send(second, "early");
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = stage.push("g", first, "*", inbox);
        stage.send(first, "one");
        inbox.await(1);
        consumer.subscribe(second, "*");
        inbox.await(2);
        consumer.unsubscribe(first);
        Thread.sleep(2_500);
        stage.send(second, "two");
        stage.send(first, "not wanted");
        inbox.await(3);
        return Seen.bodies(inbox.messages());
    }
}
