package commitmq.bench;

import java.util.ArrayList;
import java.util.List;

/** Clients that send at the same time, each with a writer of its own. */
final class Streams implements AutoCloseable {
    /** What the client with this number sends. */
    interface Client {
        void send(Stream stream, int number) throws Exception;
    }

    private final List<Peer.Writer> writers = new ArrayList<>();
    private final List<Stream> streams = new ArrayList<>();

    /** Connects the clients. {@code window} is how much each keeps outstanding; 0: as many batches of {@code batch}
     * messages as its writer likes. */
    Streams(Peer peer, String topic, Peer.Use use, Bodies bodies, int clients, int window, int batch)
            throws Exception {
        for (int i = 0; i < clients; i++) {
            Peer.Writer writer = peer.writer(topic, use);
            writers.add(writer);
            streams.add(new Stream(writer, bodies, window > 0 ? window : outstandingBatches(writer, batch)));
        }
    }

    /** Runs each client on a thread of its own until all it sent is acknowledged or has failed. */
    void each(Client client) throws Exception {
        Threads.each(streams.size(), number -> {
            client.send(streams.get(number), number);
            streams.get(number).drain();
            return null;
        });
    }

    /** Messages that failed, of all clients. */
    long errors() {
        return streams.stream().mapToLong(Stream::errors).sum();
    }

    private static int outstandingBatches(Peer.Writer writer, int batch) {
        return Math.max(1, writer.messagesOutstanding() / batch);
    }

    @Override
    public void close() {
        writers.forEach(Peer.Writer::close);
    }
}
