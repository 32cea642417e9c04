package commitmq.scenarios;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Transactional sends: their ends, and what the broker asks about those without one. */
final class Transactions {
    private Transactions() {
    }

    static Map<String, Scenario> scenarios() {
        Map<String, Scenario> found = new LinkedHashMap<>();
        found.put("transactions", Transactions::transactions);
        return found;
    }

    /** A body is what the local transaction ends in, and what a check finds. */
    private static final class Listener implements TransactionListener {
        final Map<String, MessageExt> checked = new ConcurrentHashMap<>();

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return state(Seen.body(message.getBody()).split(", ")[0]);
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            String[] words = Seen.body(message.getBody()).split(", ");
            if (words[1].equals("-")) {
                return state(words[0]);  // its end comes late, on a busy machine
            }
            checked.putIfAbsent(Seen.body(message.getBody()), message);
            return state(words[1]);
        }

        private static LocalTransactionState state(String word) {
            if (word.equals("throw")) {
                throw new IllegalStateException("the local transaction fails");
            }
            return LocalTransactionState.valueOf(word);
        }
    }

    private static Object transactions(Stage stage) throws Exception {
        String topic = stage.topic("t", 1);
        Listener listener = new Listener();
        TransactionMQProducer producer = new TransactionMQProducer(stage.own("group"));
        stage.client(producer, producer::shutdown);
        producer.setTransactionListener(listener);
        producer.start();
        List<Object> results = new ArrayList<>();
        for (String body : List.of("COMMIT_MESSAGE, -", "ROLLBACK_MESSAGE, -", "UNKNOW, COMMIT_MESSAGE",
            "UNKNOW, ROLLBACK_MESSAGE", "throw, COMMIT_MESSAGE")) {
            Message message = new Message(topic, "tag", "key", Stage.bytes(body));
            message.putUserProperty("mine", "kept");
            TransactionSendResult result = producer.sendMessageInTransaction(message, null);
            Map<String, Object> fields = Seen.result(result, stage);
            fields.remove("offset");  // that of the half message, whose topic all share
            fields.put("local", result.getLocalTransactionState());
            results.add(fields);
        }
        Stage.await(() -> Set.copyOf(Seen.bodies(stage.stored(topic, 3))).size() == 3, "three are committed", () -> "");
        Stage.await(() -> listener.checked.size() >= 3, "all are checked", listener.checked::keySet);
        Thread.sleep(Stage.MOMENT_MS);
        Map<String, Object> checked = new TreeMap<>();
        listener.checked.forEach((body, message) -> {
            Map<String, Object> line = Seen.line(message);
            line.remove("offset");
            checked.put(body, line);
        });
        Map<String, Object> lines = new TreeMap<>();
        List<MessageExt> all = stage.stored(topic, 3);
        for (MessageExt message : all) {
            Map<String, Object> line = Seen.line(message);
            line.remove("offset");  // checks come in any order
            if (Seen.body(message.getBody()).endsWith("-")) {
                ((Map<?, ?>) line.get("properties")).remove("TRANSACTION_CHECK_TIMES");  // its end came before or after a check
            }
            lines.put(Seen.body(message.getBody()), line);
        }
        boolean doubled = all.size() > lines.size();
        return List.of(results, checked, lines, doubled);
    }
}
