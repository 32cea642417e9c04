package commitmq.scenarios;

import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;

/** What differs between versions of the clients. */
public interface Edition {
    /** Each consumer of the group gets all messages. */
    void broadcast(DefaultMQPushConsumer consumer);

    /** What only this version can do, by name. */
    Map<String, Scenario> scenarios();

    /** The edition of the clients on the class path. */
    static Edition here() throws ReflectiveOperationException {
        Class<?> found;
        try {
            found = Class.forName("commitmq.scenarios.v5.FifthEdition");
        } catch (ClassNotFoundException absent) {
            found = Class.forName("commitmq.scenarios.v4.FourthEdition");
        }
        return (Edition) found.getDeclaredConstructor().newInstance();
    }
}
