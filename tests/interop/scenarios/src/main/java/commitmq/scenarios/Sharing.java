package commitmq.scenarios;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Consumers of one group: each queue has one owner, and each message comes once. */
final class Sharing {
    private static final int QUEUES = 4;

    private Sharing() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("share_concurrent", stage -> share(stage, false));
        found.put("share_ordered", stage -> share(stage, true));
        return found;
    }

    private static Object share(Stage stage, boolean ordered) throws Exception {
        String topic = stage.topic("t", QUEUES);
        List<Inbox> inboxes = new ArrayList<>();
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int number = 0; number < 2; number++) {
            Inbox inbox = new Inbox();
            DefaultMQPushConsumer consumer = stage.consumer("g");
            consumer.subscribe(topic, "*");
            if (ordered) {
                consumer.registerMessageListener(inbox.orderly());
            } else {
                consumer.registerMessageListener(inbox.concurrently());
            }
            consumer.start();
            inboxes.add(inbox);
            consumers.add(consumer);
        }
        Stage.await(() -> owned(consumers.get(0), topic).size() == 2 && owned(consumers.get(1), topic).size() == 2,
            "both have two queues", () -> owned(consumers.get(0), topic) + " " + owned(consumers.get(1), topic));
        List<Object> found = new ArrayList<>();
        Set<Integer> both = new TreeSet<>(owned(consumers.get(0), topic));
        both.addAll(owned(consumers.get(1), topic));
        found.add(both);
        Thread.sleep(1_000);  // a queue that changes hands is read a moment later

        sendToEach(stage, topic, "shared");
        Stage.await(() -> inboxes.get(0).size() + inboxes.get(1).size() >= 2 * QUEUES, "all are received",
            () -> Seen.bodies(inboxes.get(0).messages()) + " " + Seen.bodies(inboxes.get(1).messages()));
        Thread.sleep(Stage.MOMENT_MS);
        Set<Integer> first = queues(inboxes.get(0).messages());
        Set<Integer> second = queues(inboxes.get(1).messages());
        Set<Integer> shared = new HashSet<>(first);
        shared.retainAll(second);
        found.add(List.of(first.size(), second.size(), shared.size()));
        found.add(inboxes.get(0).size() + inboxes.get(1).size());

        consumers.get(1).shutdown();
        Stage.await(() -> owned(consumers.get(0), topic).size() == QUEUES, "one has all queues",
            () -> owned(consumers.get(0), topic));
        int before = inboxes.get(0).size();
        sendToEach(stage, topic, "alone");
        inboxes.get(0).await(before + 2 * QUEUES);
        found.add(inboxes.get(0).messages().stream().map(message -> Seen.body(message.getBody()))
            .filter(body -> body.startsWith("alone")).sorted().toList());
        return found;
    }

    private static void sendToEach(Stage stage, String topic, String word) throws Exception {
        for (int queue = 0; queue < QUEUES; queue++) {
            stage.sendTo(topic, queue, word + " " + queue + " a", word + " " + queue + " b");
        }
    }

    private static Set<Integer> queues(List<MessageExt> messages) {
        Set<Integer> found = new TreeSet<>();
        messages.forEach(message -> found.add(message.getQueueId()));
        return found;
    }

    private static Set<Integer> owned(DefaultMQPushConsumer consumer, String topic) {
        Set<Integer> found = new TreeSet<>();
        for (MessageQueue queue : consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet()) {
            if (queue.getTopic().equals(topic)) {
                found.add(queue.getQueueId());
            }
        }
        return found;
    }
}
