package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** What clients are refused, and how: the exception and the code. */
public final class Refusals {
    /** A call that should fail. */
    private interface Call {
        Object run() throws Exception;
    }

    private Refusals() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("refused_sends", Refusals::sends);
        found.put("refused_pulls", Refusals::pulls);
        found.put("refused_starts", Refusals::starts);
        found.put("refused_administration", Refusals::administration);
        return found;
    }

    /** An exception's class and RocketMQ's code. */
    public static Map<String, Object> of(Throwable error) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("class", error.getClass().getSimpleName());
        if (error instanceof MQClientException client) {
            fields.put("code", client.getResponseCode());
        } else if (error instanceof MQBrokerException broker) {
            fields.put("code", broker.getResponseCode());
        }
        if (error.getCause() != null && error.getCause() != error) {
            fields.put("cause", of(error.getCause()));
        }
        return fields;
    }

    private static void note(Map<String, Object> found, String what, Call call) {
        try {
            found.put(what, call.run());
        } catch (Exception error) {
            found.put(what, of(error));
        }
    }

    private static Object sends(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        DefaultMQProducer producer = new DefaultMQProducer(stage.own("careless"));
        stage.client(producer, producer::shutdown);
        producer.setMaxMessageSize(8 * 1024 * 1024);  // so that the broker says no
        producer.setCompressMsgBodyOverHowmuch(8 * 1024 * 1024);
        producer.setCreateTopicKey("no-template");
        producer.start();
        producer.send(new Message(topic, Stage.bytes("the route is known")));
        Map<String, Object> found = new LinkedHashMap<>();
        byte[] large = new byte[4 * 1024 * 1024 + 1];
        new Random(7).nextBytes(large);
        note(found, "body too large", () -> producer.send(new Message(topic, large)).getSendStatus());
        note(found, "body too large for the client", () ->
            stage.producer().send(new Message(topic, large)).getSendStatus());
        note(found, "properties too large", () -> {
            Message message = new Message(topic, Stage.bytes("x"));
            message.putUserProperty("long", "v".repeat(40_000));
            return producer.send(message).getSendStatus();
        });
        note(found, "body empty", () -> producer.send(new Message(topic, new byte[0])).getSendStatus());
        note(found, "no body", () -> producer.send(new Message(topic, null)).getSendStatus());
        note(found, "no topic", () -> producer.send(new Message("", Stage.bytes("x"))).getSendStatus());
        note(found, "illegal topic", () -> producer.send(new Message("what?", Stage.bytes("x"))).getSendStatus());
        note(found, "topic too long", () ->
            producer.send(new Message("t".repeat(300), Stage.bytes("x"))).getSendStatus());
        note(found, "topic of the system", () ->
            producer.send(new Message("SCHEDULE_TOPIC_XXXX", Stage.bytes("x"))).getSendStatus());
        note(found, "absent topic without a route", () ->
            producer.send(new Message(stage.own("absent"), Stage.bytes("x"))).getSendStatus());
        note(found, "absent topic at the broker", () -> producer.send(
            new Message(stage.own("absent"), Stage.bytes("x")), Stage.queue(stage.own("absent"), 0)).getSendStatus());
        note(found, "absent queue", () ->
            producer.send(new Message(topic, Stage.bytes("x")), Stage.queue(topic, 9)).getSendStatus());
        note(found, "queue of another topic", () ->
            producer.send(new Message(topic, Stage.bytes("x")), Stage.queue("other", 0)).getSendStatus());
        String readOnly = stage.topic("read-only", 1, 4);
        note(found, "topic without write permission", () ->
            producer.send(new Message(readOnly, Stage.bytes("x"))).getSendStatus());
        note(found, "queue of a topic without write permission", () ->
            producer.send(new Message(readOnly, Stage.bytes("x")), Stage.queue(readOnly, 0)).getSendStatus());
        note(found, "empty batch", () -> producer.send(List.of()).getSendStatus());
        note(found, "batch of two topics", () -> producer.send(List.of(
            new Message(topic, Stage.bytes("x")), new Message(readOnly, Stage.bytes("x")))).getSendStatus());
        note(found, "batch with a delay", () -> {
            Message late = new Message(topic, Stage.bytes("x"));
            late.setDelayTimeLevel(1);
            return producer.send(List.of(late)).getSendStatus();
        });
        note(found, "batch too large", () -> producer.send(List.of(
            new Message(topic, large), new Message(topic, Stage.bytes("x")))).getSendStatus());
        return found;
    }

    private static Object pulls(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        String writeOnly = stage.topic("write-only", 1, 2);
        stage.send(topic, "x");
        stage.stored(topic, 1);
        Map<String, Object> found = new LinkedHashMap<>();
        note(found, "absent topic", () ->
            stage.puller().pull(Stage.queue(stage.own("absent"), 0), "*", 0, 1).getPullStatus());
        note(found, "absent queue", () -> stage.puller().pull(Stage.queue(topic, 5), "*", 0, 1).getPullStatus());
        note(found, "queue -1", () -> stage.puller().pull(Stage.queue(topic, -1), "*", 0, 1).getPullStatus());
        note(found, "topic without read permission", () ->
            stage.puller().pull(Stage.queue(writeOnly, 0), "*", 0, 1).getPullStatus());
        note(found, "queues of an absent topic", () ->
            stage.puller().fetchSubscribeMessageQueues(stage.own("absent")).size());
        note(found, "queues of a topic without read permission", () ->
            stage.puller().fetchSubscribeMessageQueues(writeOnly).size());
        Stage.await(() -> stage.puller().pull(Stage.queue(topic, 0), MessageSelector.bySql("a > 1"), 0, 1) != null,
            "filters may be used", () -> "");
        note(found, "wrong expression", () ->
            stage.puller().pull(Stage.queue(topic, 0), MessageSelector.bySql("a >"), 0, 1).getPullStatus());
        note(found, "no messages wanted", () -> stage.puller().pull(Stage.queue(topic, 0), "*", 0, 0).getPullStatus());
        return found;
    }

    private static Object starts(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Map<String, Object> found = new LinkedHashMap<>();
        for (String group : List.of("", "what?", "DEFAULT_PRODUCER", "g".repeat(300))) {
            note(found, "producer group " + group, () -> {
                DefaultMQProducer producer = new DefaultMQProducer(group);
                stage.client(producer, producer::shutdown);
                producer.start();
                return "started";
            });
        }
        for (String group : List.of("", "what?", "DEFAULT_CONSUMER", "g".repeat(300))) {
            note(found, "consumer group " + group, () -> start(stage, new DefaultMQPushConsumer(group), topic, null));
        }
        note(found, "wrong expression", () ->
            start(stage, new DefaultMQPushConsumer(stage.own("wrong")), topic, MessageSelector.bySql("a > AND")));
        note(found, "unknown kind of expression", () ->
            start(stage, new DefaultMQPushConsumer(stage.own("unknown")), topic, MessageSelector.bySql("")));
        return found;
    }

    private static Object start(Stage stage, DefaultMQPushConsumer consumer, String topic, MessageSelector selector)
        throws Exception {
        stage.client(consumer, consumer::shutdown);
        consumer.subscribe(topic, selector == null ? MessageSelector.byTag("*") : selector);
        consumer.registerMessageListener(new Inbox().concurrently());
        consumer.start();
        return "started";
    }

    private static Object administration(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        stage.send(topic, "x");
        MessageExt stored = stage.stored(topic, 1).get(0);
        Map<String, Object> found = new LinkedHashMap<>();
        note(found, "topic of the system", () -> {
            stage.api().createTopic(stage.address, "TBW102",
                new org.apache.rocketmq.common.TopicConfig("SCHEDULE_TOPIC_XXXX", 1, 1, 6), Stage.CALL_MS);
            return "made";
        });
        note(found, "illegal topic", () -> {
            stage.api().createTopic(stage.address, "TBW102",
                new org.apache.rocketmq.common.TopicConfig("what?", 1, 1, 6), Stage.CALL_MS);
            return "made";
        });
        note(found, "reset of an absent topic", () -> stage.api().invokeBrokerToResetOffset(
            stage.address, stage.own("absent"), stage.own("g"), 0, true, Stage.CALL_MS));
        note(found, "reset of an absent group", () -> stage.api().invokeBrokerToResetOffset(
            stage.address, topic, stage.own("absent"), 0, true, Stage.CALL_MS).size());
        note(found, "members of an absent group", () ->
            stage.api().getConsumerIdListByGroup(stage.address, stage.own("absent"), Stage.CALL_MS));
        note(found, "route of an absent topic", () ->
            stage.api().getTopicRouteInfoFromNameServer(stage.own("absent"), Stage.CALL_MS) != null);
        // The client then sends it itself, to a queue that it takes from the topic's route, or from that of new topics.
        String retry = "%RETRY%" + stage.own("puller");
        Stage.await(() -> stage.api().getTopicRouteInfoFromNameServer(retry, Stage.CALL_MS) != null, "the route of " + retry,
            () -> "");
        note(found, "a message of an absent place is given back", () -> {
            stored.setCommitLogOffset(1L << 40);
            stage.puller().sendMessageBack(stored, 1, "commitmq", stage.own("g"));
            return "taken";
        });
        return found;
    }
}
