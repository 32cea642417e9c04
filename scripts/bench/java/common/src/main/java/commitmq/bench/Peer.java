package commitmq.bench;

import java.util.List;

/** One system's client, for one topic of one server. */
public interface Peer extends AutoCloseable {
    /** How a writer is going to be used: each is tuned as its documentation advises for that. */
    enum Use {
        /** One message, wait for its acknowledgement, the next one; also messages at a low rate. Lowest latency. */
        SINGLE,
        /** Single messages at a rate at which they must travel together, with the lowest latency at that. */
        RATE,
        /** Single messages, many outstanding. */
        PIPELINE,
        /** Batches. */
        BATCH
    }

    /** Called once for each message or batch, on any thread; {@code error} is null when the server has acknowledged. */
    interface Done {
        void with(Throwable error);
    }

    /** Gets each body that was read: {@code length} bytes of {@code array} from {@code at}, valid during the call. */
    interface Sink {
        void accept(byte[] array, int at, int length);
    }

    /** Sends to the topic. Safe for use by several threads. */
    interface Writer extends AutoCloseable {
        /** Returns when the server has acknowledged the message. */
        void send(byte[] body) throws Exception;

        /** Sends without waiting. {@code key} may be null. */
        void submit(byte[] body, String key, Done done) throws Exception;

        /** Sends all without waiting; {@code done} is called once, after the last acknowledgement. */
        void submit(List<byte[]> bodies, Done done) throws Exception;

        /** How many messages one client keeps outstanding when it sends batches; one batch at least. */
        int messagesOutstanding();

        @Override
        void close();
    }

    /** Reads the topic's queues; of one thread. */
    interface Reader extends AutoCloseable {
        /** Gives what is there to {@code sink}, or waits for it at most {@code timeoutMs}; returns how many. */
        int poll(long timeoutMs, Sink sink) throws Exception;

        @Override
        void close();
    }

    /** Creates the topic unless it is there. */
    void createTopic(String topic, int queues) throws Exception;

    Writer writer(String topic, Use use) throws Exception;

    /** A reader that has read nothing yet and stands at the first message of all queues, or behind the last one. */
    Reader reader(String topic, boolean atEnd) throws Exception;

    /** Messages that consumers can read, of all queues together. */
    long readable(String topic) throws Exception;

    /** Sends one message and reads exactly it back; throws when either does not work now. */
    void roundTrip(String topic, byte[] body) throws Exception;

    /** How many messages the server finds by this key; only of systems that can look one up. */
    default int lookUp(String topic, String key) throws Exception {
        throw new UnsupportedOperationException("this system finds no message by its key");
    }

    /** What the system does with messages beyond storing them; only of systems that can. */
    default Semantics semantics() throws Exception {
        throw new UnsupportedOperationException("this system delays no messages and has no transactions");
    }

    @Override
    void close();
}
