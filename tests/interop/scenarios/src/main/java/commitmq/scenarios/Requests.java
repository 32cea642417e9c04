package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Requests and their replies. */
final class Requests {
    private Requests() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("request_reply", Requests::requestReply);
        return found;
    }

    private static Object requestReply(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        List<Object> asked = java.util.Collections.synchronizedList(new ArrayList<>());
        List<Object> replied = java.util.Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = stage.consumer("g");
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((List<MessageExt> batch, ConsumeConcurrentlyContext context) -> {
            for (MessageExt message : batch) {
                asked.add(Seen.line(message));
                try {
                    Message reply = MessageUtil.createReplyMessage(message, Stage.bytes("re: " + Seen.body(message.getBody())));
                    reply.putUserProperty("mine", "kept");
                    replied.add(stage.producer().send(reply, Stage.CALL_MS).getSendStatus());
                } catch (Exception error) {
                    replied.add(Refusals.of(error));
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        stage.producer();
        consumer.start();
        List<Object> found = new ArrayList<>();
        found.add(reply(stage.producer().request(new Message(topic, "tag", Stage.bytes("who?")), 20_000)));
        CompletableFuture<Object> later = new CompletableFuture<>();
        stage.producer().request(new Message(topic, Stage.bytes("and who?")), new RequestCallback() {
            @Override
            public void onSuccess(Message message) {
                later.complete(reply(message));
            }

            @Override
            public void onException(Throwable error) {
                later.complete(Refusals.of(error));
            }
        }, 20_000);
        found.add(later.get(20_000, TimeUnit.MILLISECONDS));
        try {
            found.add(reply(stage.producer().request(new Message(stage.topic("silent", 1), Stage.bytes("?")), 1_500)));
        } catch (Exception error) {
            found.add(Refusals.of(error));
        }
        Stage.await(() -> replied.size() == 2, "both are replied to", () -> replied);
        return List.of(found, List.copyOf(asked), List.copyOf(replied));
    }

    private static Map<String, Object> reply(Message message) {
        MessageExt reply = (MessageExt) message;
        Map<String, Object> fields = Seen.line(reply);
        fields.remove("queue");  // of the reply topic, which all share
        fields.remove("offset");
        fields.remove("id");
        return fields;
    }
}
