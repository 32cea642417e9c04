package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** Messages are found by key, by unique key and by id. */
final class Lookups {
    private Lookups() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("lookups", Lookups::lookups);
        return found;
    }

    private static Object lookups(Stage stage) throws Exception {
        String topic = stage.topic("t", 2);
        List<SendResult> sent = new ArrayList<>();
        for (int number = 0; number < 4; number++) {
            sent.add(stage.producer().send(new Message(topic, "tag", "all own" + number, Stage.bytes("body " + number)),
                Stage.queue(topic, number % 2)));
        }
        Stage.await(() -> keyed(stage, topic, "all").size() == 4, "the index has all", () -> keyed(stage, topic, "all"));
        List<Object> found = new ArrayList<>();
        found.add(keyed(stage, topic, "all"));
        found.add(keyed(stage, topic, "own2"));
        found.add(tried(() -> keyed(stage, topic, "absent")));
        found.add(tried(() -> keyed(stage, stage.own("absent"), "all")));
        found.add(tried(() -> Seen.bodies(
            stage.producer().queryMessage(topic, "all", 32, 0, 1_000).getMessageList())));
        found.add(tried(() -> stage.producer().queryMessage(topic, "all", 2, 0, Long.MAX_VALUE).getMessageList().size()));
        found.add(Seen.line(stage.producer().viewMessage(topic, sent.get(1).getMsgId())));
        found.add(Seen.line(stage.producer().viewMessage(topic, sent.get(2).getOffsetMsgId())));
        found.add(tried(() -> Seen.bodies(
            stage.producer().queryMessage(topic, sent.get(3).getMsgId(), 32, 0, Long.MAX_VALUE).getMessageList())));
        String id = sent.get(0).getOffsetMsgId();
        found.add(tried(() -> Seen.line(stage.producer().viewMessage(topic, id.substring(0, 16) + "00000000FFFFFFFF"))));
        found.add(tried(() -> Seen.line(stage.producer().viewMessage(topic, "no id"))));
        return found;
    }

    private static List<String> keyed(Stage stage, String topic, String key) throws Exception {
        return Seen.bodies(stage.producer().queryMessage(topic, key, 32, 0, Long.MAX_VALUE).getMessageList());
    }

    private static Object tried(Callable<?> call) {
        try {
            return call.call();
        } catch (Exception error) {
            return Refusals.of(error);
        }
    }
}
