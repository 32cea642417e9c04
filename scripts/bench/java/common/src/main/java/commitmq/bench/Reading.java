package commitmq.bench;

import com.google.gson.JsonObject;
import java.util.concurrent.atomic.AtomicLong;

/** The works with a consumer that reads as fast as it can. */
final class Reading {
    private static final long POLL_MS = 1000;
    private static final double NOTHING_COMES_S = 30;

    private final Request request;
    private final Peer peer;

    Reading(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
    }

    /** Reads what the topic holds, from its first message on. */
    JsonObject catchUp() throws Exception {
        new WarmUp(request, peer).read();
        try (Peer.Reader reader = peer.reader(request.topic(), false)) {
            Checksum checksum = new Checksum();
            long[] first = {0};
            long began = System.nanoTime();
            read(reader, checksum, request.messages(), first);
            double seconds = (System.nanoTime() - began) / 1e9;
            JsonObject result = new JsonObject();
            result.addProperty("messages", checksum.messages());
            result.addProperty("seconds", seconds);
            result.addProperty("rate", checksum.messages() / seconds);
            result.addProperty("bytes", checksum.bytes());
            result.addProperty("checksum", checksum.sum());
            result.addProperty("first_s", (first[0] - began) / 1e9);
            return result;
        }
    }

    /** Clients send batches for {@code seconds}, and one consumer follows them. The clock stops when it has everything. */
    JsonObject following() throws Exception {
        int clients = request.clients();
        Bodies bodies = new Bodies(request.bodyBytes(), request.seed());
        peer.createTopic(request.topic(), request.queues());
        new WarmUp(request, peer).read();
        Checksum checksum = new Checksum();
        AtomicLong produced = new AtomicLong();
        // What the consumer waits for; not known before the last acknowledgement.
        AtomicLong wanted = new AtomicLong(Long.MAX_VALUE);
        try (Peer.Reader reader = peer.reader(request.topic(), true);
                Streams streams = new Streams(peer, request.topic(), Peer.Use.BATCH, bodies, clients, 0, request.batch())) {
            reader.poll(0, checksum);
            long began = System.nanoTime();
            long until = began + Sending.nanoseconds(request.seconds());
            long[] lastSent = {0};
            Threads.each(2, which -> {
                if (which == 0) {
                    streams.each((stream, client) -> {
                        for (long number = 0; System.nanoTime() < until; number += request.batch()) {
                            stream.submitBatch(number, request.batch());
                            produced.addAndGet(request.batch());
                        }
                    });
                    lastSent[0] = System.nanoTime();
                    wanted.set(produced.get() - streams.errors());
                } else {
                    while (checksum.messages() < wanted.get()) {
                        reader.poll(20, checksum);
                        if (System.nanoTime() > until + Sending.nanoseconds(NOTHING_COMES_S)) {
                            throw new IllegalStateException(
                                    "the consumer has " + checksum.messages() + " of " + produced + " messages");
                        }
                    }
                }
                return null;
            });
            double seconds = (System.nanoTime() - began) / 1e9;
            JsonObject result = Sending.sent(checksum.messages(), seconds, streams.errors());
            result.addProperty("produced", produced.get() - streams.errors());
            result.addProperty("consumed", checksum.messages());
            result.addProperty("produce_seconds", (lastSent[0] - began) / 1e9);
            return result;
        }
    }

    private static void read(Peer.Reader reader, Checksum checksum, long messages, long[] first) throws Exception {
        long lastSeen = System.nanoTime();
        while (checksum.messages() < messages) {
            if (reader.poll(POLL_MS, checksum) > 0) {
                lastSeen = System.nanoTime();
                first[0] = first[0] == 0 ? lastSeen : first[0];
            } else if (System.nanoTime() - lastSeen > Sending.nanoseconds(NOTHING_COMES_S)) {
                throw new IllegalStateException("nothing came for " + NOTHING_COMES_S + " s after message "
                        + checksum.messages() + " of " + messages);
            }
        }
    }
}
