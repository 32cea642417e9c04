package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Messages that consumers cannot handle: they come again, and become dead letters. */
final class Failures {
    private Failures() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("retry", Failures::retry);
        found.put("retry_default_delay", Failures::defaultDelay);
        found.put("dead_letters", Failures::deadLetters);
        found.put("dead_letters_at_once", Failures::deadLettersAtOnce);
        found.put("dead_letters_ordered", Failures::deadLettersOrdered);
        found.put("send_back", Failures::sendBack);
        return found;
    }

    private static Message message(String topic) {
        Message message = new Message(topic, "A", "key", Stage.bytes("body"));
        message.putUserProperty("mine", "kept");
        return message;
    }

    private static Object retry(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = new Inbox(one -> one.getReconsumeTimes() >= 2, 1);
        stage.push("g", topic, "A", inbox);
        stage.producer().send(message(topic));
        inbox.await(3);
        List<Object> found = new ArrayList<>();
        for (MessageExt one : inbox.messages()) {
            found.add(Seen.line(one));
        }
        found.add(Seen.lines(stage.stored("%RETRY%" + stage.own("g"), 2)));
        return found;
    }

    private static Object defaultDelay(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = new Inbox(one -> one.getReconsumeTimes() >= 1, 0);
        stage.push("g", topic, "*", inbox);
        long sent = System.nanoTime();
        stage.producer().send(message(topic));
        inbox.await(2);
        long ms = (System.nanoTime() - sent) / 1_000_000;
        return List.of(inbox.lines(), ms >= 10_000, ms < 25_000);
    }

    private static Object deadLetters(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = new Inbox(one -> false, 1);
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.setMaxReconsumeTimes(1);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        stage.producer().send(message(topic));
        List<MessageExt> dead = stage.stored("%DLQ%" + stage.own("g"), 1);
        List<Integer> perms = new ArrayList<>();
        stage.api().getTopicRouteInfoFromNameServer("%DLQ%" + stage.own("g"), Stage.CALL_MS).getQueueDatas()
            .forEach(queue -> perms.addAll(List.of(queue.getReadQueueNums(), queue.getWriteQueueNums(), queue.getPerm())));
        return List.of(inbox.await(2).lines(), Seen.lines(dead), perms);
    }

    /** Delay level -1: no second try. */
    private static Object deadLettersAtOnce(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = new Inbox(one -> false, -1);
        stage.push("g", topic, "*", inbox);
        stage.producer().send(message(topic));
        List<MessageExt> dead = stage.stored("%DLQ%" + stage.own("g"), 1);
        return List.of(inbox.await(1).lines(), Seen.lines(dead));
    }

    private static Object deadLettersOrdered(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Inbox inbox = new Inbox(one -> !Seen.body(one.getBody()).equals("body"), 0);
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.setMaxReconsumeTimes(2);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.orderly());
        consumer.start();
        stage.producer().send(message(topic));
        stage.send(topic, "next");
        inbox.await(4);
        List<Object> tries = new ArrayList<>();
        inbox.messages().forEach(one -> tries.add(List.of(Seen.body(one.getBody()), one.getReconsumeTimes())));
        return List.of(tries, Seen.lines(stage.stored("%DLQ%" + stage.own("g"), 1)));
    }

    /** A pull consumer gives a message back. */
    private static Object sendBack(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        stage.producer().send(message(topic));
        MessageExt got = stage.stored(topic, 1).get(0);
        stage.puller().sendMessageBack(got, 1, "commitmq", stage.own("other"));
        return Seen.lines(stage.stored("%RETRY%" + stage.own("other"), 1));
    }
}
