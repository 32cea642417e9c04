package commitmq.scenarios;

import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Consumers that ask for messages. */
final class Pulls {
    private Pulls() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("pull", Pulls::pull);
        found.put("pull_blocks", Pulls::pullBlocks);
        found.put("pull_offsets", Pulls::pullOffsets);
        found.put("lite_pull_assign", Pulls::liteAssign);
        found.put("lite_pull_subscribe", Pulls::liteSubscribe);
        return found;
    }

    private static Map<String, Object> result(PullResult result) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("status", result.getPullStatus());
        fields.put("next", result.getNextBeginOffset());
        fields.put("min", result.getMinOffset());
        fields.put("max", result.getMaxOffset());
        fields.put("bodies", result.getMsgFoundList() == null ? "none" : Seen.bodies(result.getMsgFoundList()));
        return fields;
    }

    private static Object pull(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        MessageQueue queue = Stage.queue(topic, 1);
        for (int number = 0; number < 10; number++) {
            Message message = new Message(topic, number % 2 == 0 ? "A" : "B", Stage.bytes("body " + number));
            message.putUserProperty("n", String.valueOf(number));
            stage.producer().send(message, queue);
        }
        stage.stored(topic, 10);
        DefaultMQPullConsumer puller = stage.puller();
        List<Object> found = new ArrayList<>();
        found.add(puller.fetchSubscribeMessageQueues(topic).size());
        for (long offset : new long[] {0, 7, 10, 11, 1_000}) {
            found.add(result(puller.pull(queue, "*", offset, 4)));
        }
        found.add(result(puller.pull(Stage.queue(topic, 0), "*", 0, 4)));
        found.add(result(puller.pull(Stage.queue(topic, 0), "*", 5, 4)));
        found.add(result(puller.pull(queue, "B", 0, 32)));
        found.add(result(puller.pull(queue, "none", 0, 32)));
        found.add(result(puller.pull(queue, "A || B", 3, 2)));
        // The client learns of the broker's version from the answer to a heartbeat.
        Stage.await(() -> puller.pull(queue, MessageSelector.bySql("n >= 6"), 0, 32) != null, "filters may be used", () -> "");
        found.add(result(puller.pull(queue, MessageSelector.bySql("n >= 6"), 0, 32)));
        found.add(result(puller.pull(queue, MessageSelector.bySql("n > 100"), 2, 32)));
        return found;
    }

    private static Object pullBlocks(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        MessageQueue queue = Stage.queue(topic, 0);
        stage.send(topic, "first");
        stage.stored(topic, 1);
        stage.producer();
        Thread later = new Thread(() -> {
            try {
                Thread.sleep(700);
                stage.send(topic, "second");
            } catch (Exception error) {
                error.printStackTrace();
            }
        });
        later.start();
        long begin = System.nanoTime();
        Object found = result(stage.puller().pullBlockIfNotFound(queue, "*", 1, 4));
        later.join();
        long ms = (System.nanoTime() - begin) / 1_000_000;
        return List.of(found, ms > 500, ms < 5_000);
    }

    private static Object pullOffsets(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        MessageQueue queue = Stage.queue(topic, 0);
        MessageQueue empty = Stage.queue(topic, 1);
        stage.sendTo(topic, 0, "0", "1");
        Thread.sleep(50);
        long middle = System.currentTimeMillis();
        Thread.sleep(50);
        stage.sendTo(topic, 0, "2", "3", "4");
        stage.stored(topic, 5);
        DefaultMQPullConsumer puller = stage.puller();
        List<Object> found = new ArrayList<>();
        for (MessageQueue one : List.of(queue, empty, Stage.queue(topic, 7), Stage.queue(stage.own("absent"), 0))) {
            try {
                found.add(List.of(puller.minOffset(one), puller.maxOffset(one), puller.searchOffset(one, 0),
                    puller.searchOffset(one, middle), puller.searchOffset(one, System.currentTimeMillis() + 60_000),
                    puller.earliestMsgStoreTime(one) > 0));
            } catch (Exception error) {
                found.add(Refusals.of(error));
            }
        }
        found.add(puller.fetchConsumeOffset(queue, true));
        puller.updateConsumeOffset(queue, 3);
        puller.persist(queue);
        Stage.await(() -> puller.fetchConsumeOffset(queue, true) == 3, "the offset is stored",
            () -> puller.fetchConsumeOffset(queue, true));
        found.add(puller.fetchConsumeOffset(queue, true));
        found.add(puller.fetchConsumeOffset(empty, true));
        return found;
    }

    private static DefaultLitePullConsumer lite(Stage stage, String word) {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(stage.own(word));
        stage.client(consumer, consumer::shutdown);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        return consumer;
    }

    /** The next {@code count} messages, and what came beyond them within a moment. */
    private static List<String> polled(DefaultLitePullConsumer consumer, int count) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        Stage.await(() -> {
            found.addAll(consumer.poll(200));
            return found.size() >= count;
        }, count + " messages", () -> Seen.bodies(found));
        return Seen.bodies(found);
    }

    private static Object liteAssign(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        for (int number = 0; number < 6; number++) {
            stage.sendTo(topic, number % 2, "body " + number);
        }
        stage.stored(topic, 6);
        DefaultLitePullConsumer consumer = lite(stage, "g");
        consumer.start();
        Collection<MessageQueue> queues = consumer.fetchMessageQueues(topic);
        List<Object> found = new ArrayList<>();
        found.add(queues.size());
        consumer.assign(queues);
        found.add(polled(consumer, 6));
        MessageQueue queue = queues.stream().filter(one -> one.getQueueId() == 0).findFirst().orElseThrow();
        consumer.seek(queue, 2);
        found.add(polled(consumer, 1));
        consumer.seekToBegin(queue);
        found.add(polled(consumer, 3));
        consumer.seekToEnd(queue);
        stage.sendTo(topic, 0, "last");
        found.add(polled(consumer, 1));
        found.add(consumer.committed(queue));
        consumer.commitSync();
        consumer.getOffsetStore().persistAll(java.util.Set.copyOf(queues));
        Stage.await(() -> consumer.committed(queue) == 4, "it is committed", () -> consumer.committed(queue));
        found.add(consumer.committed(queue));
        found.add(consumer.offsetForTimestamp(queue, 0L));
        try {
            consumer.seek(queue, 100);
            found.add("taken");
        } catch (Exception error) {
            found.add(Refusals.of(error));
        }
        return found;
    }

    private static Object liteSubscribe(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        for (int number = 0; number < 8; number++) {
            stage.producer().send(new Message(topic, number < 6 ? "A" : "B", Stage.bytes("body " + number)),
                Stage.queue(topic, number % 2));
        }
        stage.stored(topic, 8);
        List<Object> found = new ArrayList<>();
        DefaultLitePullConsumer consumer = lite(stage, "g");
        consumer.subscribe(topic, "A");
        consumer.start();
        found.add(polled(consumer, 6));
        found.add(consumer.assignment().size());
        consumer.commitSync();
        consumer.shutdown();

        stage.producer().send(new Message(topic, "A", Stage.bytes("later")), Stage.queue(topic, 0));
        DefaultLitePullConsumer next = lite(stage, "g");
        next.subscribe(topic, "A");
        next.start();
        found.add(polled(next, 1));
        return found;
    }
}
