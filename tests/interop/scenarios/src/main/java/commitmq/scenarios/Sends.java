package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;

/** Producers: results, and what is stored. */
final class Sends {
    private Sends() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("send_sync", Sends::sync);
        found.put("send_round_robin", Sends::roundRobin);
        found.put("send_async", Sends::async);
        found.put("send_oneway", Sends::oneway);
        found.put("send_batch", Sends::batch);
        found.put("send_selected", Sends::selected);
        found.put("send_new_topic", Sends::newTopic);
        found.put("send_properties", Sends::properties);
        found.put("send_compressed", Sends::compressed);
        found.put("send_delay_level", Sends::delayLevel);
        found.put("send_large", Sends::large);
        found.put("send_priority", Sends::priority);
        return found;
    }

    private static Object sync(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        List<Object> results = new ArrayList<>();
        for (int number = 0; number < 5; number++) {
            Message message = new Message(topic, "tag" + number % 2, "k" + number, Stage.bytes("body " + number));
            message.setFlag(number);
            message.setWaitStoreMsgOK(number != 3);
            results.add(Seen.result(stage.producer().send(message), stage));
        }
        return List.of(results, Seen.lines(stage.stored(topic, 5)));
    }

    private static Object roundRobin(Stage stage) throws Exception {
        String topic = stage.topic("t", 4);
        Map<Integer, List<Long>> offsets = new TreeMap<>();
        for (int number = 0; number < 12; number++) {
            SendResult result = stage.producer().send(new Message(topic, Stage.bytes("x")));
            offsets.computeIfAbsent(result.getMessageQueue().getQueueId(), queue -> new ArrayList<>())
                .add(result.getQueueOffset());
        }
        return offsets;
    }

    private static Object async(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        List<SendResult> results = new ArrayList<>();
        List<String> errors = new ArrayList<>();
        CountDownLatch left = new CountDownLatch(20);
        for (int number = 0; number < 20; number++) {
            stage.producer().send(new Message(topic, Stage.bytes("body")), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    synchronized (results) {
                        results.add(result);
                    }
                    left.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    errors.add(String.valueOf(error));
                    left.countDown();
                }
            });
        }
        boolean all = left.await(Stage.CALL_MS, TimeUnit.MILLISECONDS);
        TreeMap<Long, Object> byOffset = new TreeMap<>();
        results.forEach(result -> byOffset.put(result.getQueueOffset(), Seen.result(result, stage)));
        return List.of(all, errors, byOffset.values(), stage.stored(topic, 20).size());
    }

    private static Object oneway(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        for (int number = 0; number < 5; number++) {
            stage.producer().sendOneway(new Message(topic, "tag", Stage.bytes("body " + number)));
        }
        return new TreeSet<>(Seen.bodies(stage.stored(topic, 5)));
    }

    private static Object batch(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        List<Message> messages = new ArrayList<>();
        for (int number = 0; number < 4; number++) {
            Message message = new Message(topic, "tag" + number, "k" + number + " all", Stage.bytes("body " + number));
            message.putUserProperty("number", String.valueOf(number));
            message.setFlag(number);
            messages.add(message);
        }
        List<Object> results = new ArrayList<>();
        results.add(Seen.result(stage.producer().send(messages), stage));
        stage.send(topic, "single");
        results.add(Seen.result(stage.producer().send(List.of(new Message(topic, Stage.bytes("alone")))), stage));
        return List.of(results, Seen.lines(stage.stored(topic, 6)));
    }

    private static Object selected(Stage stage) throws Exception {
        String topic = stage.topic("t", 4);
        List<Object> results = new ArrayList<>();
        for (int number = 0; number < 8; number++) {
            SendResult result = stage.producer().send(new Message(topic, Stage.bytes("step " + number)),
                (queues, message, order) -> queues.get((Integer) order % queues.size()), number % 3);
            results.add(Seen.result(result, stage));
        }
        return List.of(results, Seen.lines(stage.stored(topic, 8)));
    }

    /** The send makes the topic. */
    private static Object newTopic(Stage stage) throws Exception {
        String topic = stage.own("made");
        List<Object> results = new ArrayList<>();
        DefaultMQProducer producer = stage.producer();
        SendResult result = producer.send(new Message(topic, Stage.bytes("first")));
        results.add(result.getSendStatus());
        results.add(result.getQueueOffset());
        Stage.await(() -> stage.api().getTopicRouteInfoFromNameServer(topic, Stage.CALL_MS) != null, "the route", () -> "");
        stage.api().getTopicRouteInfoFromNameServer(topic, Stage.CALL_MS).getQueueDatas().forEach(queue -> results.add(
            List.of(queue.getReadQueueNums(), queue.getWriteQueueNums(), queue.getPerm())));
        return results;
    }

    private static Object properties(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Message odd = new Message(topic, "标签", "key-é 🔑 third", Stage.bytes("grüße"));
        odd.putUserProperty("with space", "a b  c ");
        odd.putUserProperty("名字", "值");
        odd.putUserProperty("quote\"'", "\"'\\");
        odd.putUserProperty("equals=", "a=b;c&d");
        odd.putUserProperty("lines", "one\ntwo\r\n\tthree");
        odd.putUserProperty("emoji", "👩‍🚀");
        odd.putUserProperty("number", "-1.5e3");
        odd.setBuyerId("buyer");
        odd.setInstanceId("instance");
        Message large = new Message(topic, Stage.bytes("large"));
        large.putUserProperty("long", "v".repeat(30_000));
        List<Object> results = new ArrayList<>();
        results.add(Seen.result(stage.producer().send(odd), stage));
        results.add(Seen.result(stage.producer().send(large), stage));
        results.add(Seen.result(stage.producer().send(new Message(topic, "", "", Stage.bytes("empty tag"))), stage));
        return List.of(results, Seen.lines(stage.stored(topic, 3)));
    }

    /** A priority is a queue, but for messages that are delayed or ordered. */
    private static Object priority(Stage stage) throws Exception {
        String topic = stage.topic("t", 3);
        List<Object> results = new ArrayList<>();
        for (String priority : new String[] {"0", "1", "2", "7", "2147483647", "2147483648", "-1", "+1", "01", "x", "1.0"}) {
            results.add(Seen.result(stage.producer().send(ranked(topic, priority), FIRST, null), stage));
        }
        Message late = ranked(topic, "2");
        late.setDelayTimeLevel(1);
        Message ordered = ranked(topic, "2");
        MessageAccessor.putProperty(ordered, "__SHARDINGKEY", "s");
        for (Message message : List.of(late, ordered)) {
            results.add(Seen.result(stage.producer().send(message, FIRST, null), stage));
        }
        return List.of(results, Seen.lines(stage.stored(topic, 13)));
    }

    private static final MessageQueueSelector FIRST = (queues, message, nothing) -> queues.get(0);

    private static Message ranked(String topic, String priority) {
        Message message = new Message(topic, Stage.bytes("priority " + priority));
        MessageAccessor.putProperty(message, "_SYS_MSG_PRIORITY_", priority);
        return message;
    }

    private static Object compressed(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        for (int size : new int[] {4_095, 4_096, 4_097, 100_000}) {
            stage.producer().send(new Message(topic, Stage.bytes("0123456789abcdef".repeat(size / 16 + 1).substring(0, size))));
        }
        return Seen.lines(stage.stored(topic, 4));
    }

    private static Object delayLevel(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = new Inbox();
        stage.push("g", topic, "*", inbox);
        Message message = new Message(topic, "tag", "key", Stage.bytes("late"));
        message.setDelayTimeLevel(2);
        message.putUserProperty("mine", "kept");
        long sent = System.nanoTime();
        SendResult result = stage.producer().send(message);
        stage.send(topic, "at once");
        inbox.await(2);
        long ms = (System.nanoTime() - sent) / 1_000_000;
        return List.of(result.getSendStatus(), result.getMessageQueue().getQueueId(), inbox.lines(), ms >= 5_000);
    }

    /** Nearly the largest body that producers may send. Compression makes it a little larger. */
    private static Object large(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        byte[] body = new byte[4_190_000];
        new Random(5).nextBytes(body);
        SendResult result = stage.producer().send(new Message(topic, body));
        return List.of(Seen.result(result, stage), Seen.lines(stage.stored(topic, 1)));
    }
}
