package commitmq.bench;

/** What a system does with messages beyond storing them, for one server; only of systems that can. */
public interface Semantics {
    /** Sends messages that are delivered later. Safe for use by several threads. */
    interface Delayer extends AutoCloseable {
        /** Sends without waiting; consumers get the message at {@code deliverAtMs} of the wall clock. */
        void submit(byte[] body, long deliverAtMs, Peer.Done done) throws Exception;

        @Override
        void close();
    }

    /** Sends messages in transactions of their own. Safe for use by several threads. */
    interface Transactor extends AutoCloseable {
        /** Returns when the producer is done with the commit. */
        void commit(byte[] body) throws Exception;

        @Override
        void close();
    }

    /** Receives messages that the consumers of a group share; of one thread. */
    interface Sharer extends AutoCloseable {
        /** Gives up to {@code most} messages to {@code sink}, or waits for them; returns how many. */
        int receive(int most, long timeoutMs, Peer.Sink sink) throws Exception;

        /** Acknowledges what the last receive gave; returns when the server has it. */
        void ackReceived() throws Exception;

        @Override
        void close();
    }

    /** Handles a message; {@code tries} is how often it came before. False: it failed. Called by any thread. */
    interface Handler {
        boolean handle(byte[] body, int tries);
    }

    Delayer delayer(String topic) throws Exception;

    /** Messages that wait for their time in the server's timer. */
    long waiting() throws Exception;

    Transactor transactor(String topic) throws Exception;

    Sharer sharer(String topic, String group) throws Exception;

    /** Begins to handle the topic's messages; one that failed comes again after the first delay level, which is a second. */
    AutoCloseable handling(String topic, String group, Handler handler) throws Exception;
}
