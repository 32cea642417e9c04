package commitmq.scenarios.v5;

import commitmq.scenarios.Inbox;
import commitmq.scenarios.Refusals;
import commitmq.scenarios.Scenario;
import commitmq.scenarios.Seen;
import commitmq.scenarios.Stage;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** Messages at a time, and recalls of them. */
final class Timers {
    private Timers() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("timer", Timers::timer);
        found.put("timer_recall", Timers::recall);
        found.put("timer_refused", Timers::refused);
        return found;
    }

    private static Message message(String topic, String body) {
        Message message = new Message(topic, "tag", "key", Stage.bytes(body));
        message.putUserProperty("mine", "kept");
        return message;
    }

    private static Inbox listen(Stage stage, String topic) throws Exception {
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        return inbox;
    }

    private static Object timer(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = listen(stage, topic);
        List<Object> results = new ArrayList<>();
        long begin = System.nanoTime();
        Message seconds = message(topic, "in 2 s");
        seconds.setDelayTimeSec(2);
        Message milliseconds = message(topic, "in 4 s");
        milliseconds.setDelayTimeMs(4_000);
        Message time = message(topic, "at a time 6 s ahead");
        time.setDeliverTimeMs(System.currentTimeMillis() + 6_000);
        Message past = message(topic, "at a time before now");
        past.setDeliverTimeMs(System.currentTimeMillis() - 10_000);
        for (Message message : List.of(seconds, milliseconds, time, past)) {
            SendResult result = stage.producer().send(message);
            results.add(List.of(result.getSendStatus(), result.getMessageQueue().getQueueId(), result.getRecallHandle() != null));
        }
        inbox.await(4);
        long ms = (System.nanoTime() - begin) / 1_000_000;
        return List.of(results, inbox.lines(), ms >= 5_000, ms < 15_000);
    }

    private static Object recall(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = listen(stage, topic);
        Message cancelled = message(topic, "cancelled");
        cancelled.setDelayTimeSec(4);
        Message kept = message(topic, "kept");
        kept.setDelayTimeSec(6);
        SendResult gone = stage.producer().send(cancelled);
        SendResult stays = stage.producer().send(kept);
        List<Object> found = new ArrayList<>();
        found.add(stage.producer().recallMessage(topic, gone.getRecallHandle()).equals(gone.getMsgId()));
        for (String handle : new String[] {"", "no handle", stays.getRecallHandle().substring(4)}) {
            found.add(tried(stage, topic, handle));
        }
        found.add(tried(stage, stage.topic("other", 1), stays.getRecallHandle()));
        found.add(tried(stage, stage.own("absent"), stays.getRecallHandle()));
        inbox.await(1);
        found.add(tried(stage, topic, gone.getRecallHandle()));
        found.add(Seen.bodies(stage.stored(topic, 1)));
        return found;
    }

    private static Object tried(Stage stage, String topic, String handle) {
        try {
            return List.of("an id", stage.producer().recallMessage(topic, handle).length());
        } catch (Exception error) {
            return Refusals.of(error);
        }
    }

    private static Object refused(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        List<Object> found = new ArrayList<>();
        for (long days : new long[] {4, 400}) {
            Message late = message(topic, "too late");
            late.setDelayTimeSec(days * 86_400);
            try {
                found.add(stage.producer().send(late).getSendStatus());
            } catch (Exception error) {
                found.add(Refusals.of(error));
            }
        }
        return found;
    }
}
