package commitmq.interop;

import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import java.util.function.Function;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Requests that a program of RocketMQ makes, each with its outcome: what matters of the answer, or the code of the refusal. */
abstract class Replay {
    final DefaultMQAdminExt admin = new DefaultMQAdminExt(10_000);
    final Map<String, Object> outcomes = new LinkedHashMap<>();

    Replay(String names, String instance) {
        admin.setNamesrvAddr(names);
        admin.setInstanceName(instance);
    }

    final Map<String, Object> run(String[] words) throws Exception {
        admin.start();
        try {
            replay(words);
            return outcomes;
        } finally {
            admin.shutdown();
        }
    }

    abstract void replay(String[] words) throws Exception;

    final void step(String name, Callable<Object> request) {
        outcomes.put(name, outcome(request));
    }

    static Object outcome(Callable<Object> request) {
        try {
            return request.call();
        } catch (MQClientException error) {
            return "CODE " + error.getResponseCode();
        } catch (MQBrokerException error) {
            return "CODE " + error.getResponseCode();
        } catch (Exception error) {
            return error.getClass().getSimpleName();
        }
    }

    /** A table of queues, by topic and queue. */
    static <T> Map<String, Object> byQueue(Map<MessageQueue, T> table, Function<T, Object> value) {
        Map<String, Object> found = new TreeMap<>();
        table.forEach((queue, one) -> found.put(queue.getTopic() + "/" + queue.getQueueId(), value.apply(one)));
        return found;
    }
}
