package commitmq.bench;

/** Work before the clock starts, so that server and client have compiled what is measured: in a topic of its own, so that
 * the measured topic holds what was counted and nothing else. */
final class WarmUp {
    private static final long POLL_MS = 100;

    private final Request request;
    private final Peer peer;
    private final String topic;

    WarmUp(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.topic = request.topic() + "-warm-up";
    }

    /** Sends like the measured clients for the request's {@code warmup_s}; returns how many were acknowledged. */
    long send(Peer.Use use, int clients, int window) throws Exception {
        Bodies bodies = new Bodies(request.bodyBytes(), request.seed() + 1);
        long until = System.nanoTime() + Sending.nanoseconds(request.warmupSeconds());
        peer.createTopic(topic, 1);
        long before = peer.readable(topic);
        try (Streams streams = new Streams(peer, topic, use, bodies, clients, window, request.batch())) {
            streams.each((stream, client) -> {
                while (System.nanoTime() < until) {
                    if (use == Peer.Use.BATCH) {
                        stream.submitBatch(0, request.batch());
                    } else {
                        stream.submit(0, null);
                    }
                }
            });
        }
        return peer.readable(topic) - before;
    }

    /** Sends batches and then reads them, twice, each for about half of {@code warmup_s}. */
    void read() throws Exception {
        if (request.warmupSeconds() <= 0) {
            return;
        }
        send(Peer.Use.BATCH, 1, 0);
        for (long until = System.nanoTime() + Sending.nanoseconds(request.warmupSeconds()); System.nanoTime() < until; ) {
            Checksum checksum = new Checksum();
            try (Peer.Reader reader = peer.reader(topic, false)) {
                long all = peer.readable(topic);
                while (checksum.messages() < all && System.nanoTime() < until) {
                    reader.poll(POLL_MS, checksum);
                }
            }
        }
    }
}
