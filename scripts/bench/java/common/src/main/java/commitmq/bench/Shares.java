package commitmq.bench;

import com.google.gson.JsonObject;
import java.util.concurrent.atomic.AtomicLong;

/** Clients of one group receive batches of messages and acknowledge them, and so on, until all are done. */
final class Shares {
    private static final String GROUP = "bench-group";
    private static final int WARM_SHARE = 10;
    private static final int FILL_BATCH = 1000;
    private static final long POLL_MS = 200;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;

    Shares(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.bodies = new Bodies(request.bodyBytes(), request.seed());
    }

    /** They did so before: with a tenth of the messages, three times as Java is warmed up, in topics of their own. */
    JsonObject run() throws Exception {
        long few = Math.max(request.batch(), request.messages() / WARM_SHARE);
        for (int turn = 0; turn < 3; turn++) {
            run(request.topic() + "-warm-up-" + turn, few);
        }
        return run(request.topic(), request.messages());
    }

    private JsonObject run(String topic, long messages) throws Exception {
        peer.createTopic(topic, request.queues());
        long before = peer.readable(topic);
        try (Streams streams = new Streams(peer, topic, Peer.Use.BATCH, bodies, 1, 1, FILL_BATCH)) {
            streams.each((stream, client) -> {
                for (long number = 0; number < messages; number += FILL_BATCH) {
                    stream.submitBatch(number, (int) Math.min(FILL_BATCH, messages - number));
                }
            });
            if (streams.errors() > 0) {
                throw new IllegalStateException(streams.errors() + " messages were not stored");
            }
        }
        Sending.waitUntilReadable(peer, topic, before + messages);
        AtomicLong done = new AtomicLong();
        AtomicLong receives = new AtomicLong();
        AtomicLong sum = new AtomicLong();
        AtomicLong ended = new AtomicLong();
        long deadline = System.nanoTime() + Sending.nanoseconds(request.timeoutSeconds());
        long began = System.nanoTime();
        Threads.each(request.clients(), client -> {
            try (Semantics.Sharer sharer = peer.semantics().sharer(topic, GROUP)) {
                Checksum checksum = new Checksum();
                while (done.get() < messages) {
                    if (System.nanoTime() > deadline) {
                        throw new IllegalStateException(done + " of " + messages + " messages were received in time");
                    }
                    int count = sharer.receive(request.batch(), POLL_MS, checksum);
                    if (count > 0) {
                        sharer.ackReceived();
                        receives.incrementAndGet();
                        if (done.addAndGet(count) >= messages) {
                            ended.set(System.nanoTime());
                        }
                    }
                }
                sum.addAndGet(checksum.sum());
            }
            return null;
        });
        JsonObject result = Sending.sent(done.get(), (ended.get() - began) / 1e9, 0);
        result.addProperty("receives", receives.get());
        result.addProperty("sent_checksum", bodies.checksum(messages));
        result.addProperty("checksum", sum.get());
        return result;
    }
}
