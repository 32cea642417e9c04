package commitmq.scenarios.v5;

import commitmq.scenarios.Inbox;
import commitmq.scenarios.Scenario;
import commitmq.scenarios.Seen;
import commitmq.scenarios.Stage;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;

/** Push consumers to which the broker assigns their queues. */
final class Pops {
    private Pops() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("pop", Pops::pop);
        found.put("pop_shared", Pops::shared);
        found.put("pop_retry", Pops::retry);
        return found;
    }

    private static void mode(Stage stage, String topic) throws Exception {
        stage.api().setMessageRequestMode(stage.address(), topic, stage.own("g"), MessageRequestMode.POP, 8, 5_000);
    }

    private static DefaultMQPushConsumer popping(Stage stage, String topic) throws Exception {
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.setClientRebalance(false);
        consumer.subscribe(topic, "A || B");
        return consumer;
    }

    private static Object pop(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        mode(stage, topic);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = popping(stage, topic);
        consumer.registerMessageListener(inbox.concurrently());
        for (int number = 0; number < 12; number++) {
            stage.producer().send(new Message(topic, number % 4 == 3 ? "C" : "A", "key", Stage.bytes("body " + number)));
        }
        consumer.start();
        inbox.await(9);
        stage.producer().send(new Message(topic, "B", Stage.bytes("later")));
        inbox.await(10);
        List<Object> found = new ArrayList<>();
        found.add(Seen.bodies(inbox.messages()).stream().sorted().toList());
        found.add(Seen.line(later(inbox)).get("properties"));
        return found;
    }

    private static MessageExt later(Inbox inbox) {
        return inbox.messages().stream().filter(one -> new String(one.getBody()).equals("later")).findFirst().orElseThrow();
    }

    private static Object shared(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        mode(stage, topic);
        List<Inbox> inboxes = List.of(new Inbox(), new Inbox());
        for (Inbox inbox : inboxes) {
            DefaultMQPushConsumer consumer = popping(stage, topic);
            consumer.registerMessageListener(inbox.concurrently());
            consumer.start();
        }
        for (int number = 0; number < 40; number++) {
            stage.producer().send(new Message(topic, "A", Stage.bytes("body " + number)));
        }
        Stage.await(() -> inboxes.get(0).messages().size() + inboxes.get(1).messages().size() >= 40, "all are received",
            () -> inboxes.get(0).messages().size() + inboxes.get(1).messages().size());
        Thread.sleep(1_000);
        List<String> bodies = new ArrayList<>();
        inboxes.forEach(inbox -> inbox.messages().forEach(one -> bodies.add(new String(one.getBody()))));
        Collections.sort(bodies);
        return bodies;
    }

    private static Object retry(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        mode(stage, topic);
        List<Map<String, Object>> got = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = popping(stage, topic);
        consumer.registerMessageListener((List<MessageExt> batch, ConsumeConcurrentlyContext context) -> {
            batch.forEach(one -> got.add(Seen.line(one)));
            return batch.get(0).getReconsumeTimes() == 0 ? ConsumeConcurrentlyStatus.RECONSUME_LATER
                : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Message message = new Message(topic, "A", "key", Stage.bytes("body"));
        message.putUserProperty("mine", "kept");
        stage.producer().send(message);
        Stage.await(() -> got.size() >= 2, "it comes again", () -> got);
        Thread.sleep(3_000);
        got.get(1).remove("offset");
        return got;
    }
}
