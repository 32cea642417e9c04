package commitmq.bench;

import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.util.BitSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;

/** An open loop: one thread sends at a fixed rate, another receives; a message's latency counts from when it should have
 * been sent, so that a system that falls behind cannot hide it. */
final class EndToEnd {
    /** After the planned end, so long may a slow system still take. What has not arrived then is counted as lost, and its latency
     * as the time until then, so that the percentiles of a system that cannot keep up are lower bounds. */
    private static final double GRACE_S = 10;

    /** Messages a second that each of the compared systems can send one by one on a small machine. */
    private static final double HIGHEST_SINGLE_RATE = 2000;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;
    private final long intervalNs;
    private final int messages;
    private final int warmUp;

    EndToEnd(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.bodies = new Bodies(request.bodyBytes(), request.seed());
        this.intervalNs = Math.round(1e9 / request.rate());
        this.warmUp = (int) (request.rate() * request.warmupSeconds());
        this.messages = warmUp + (int) (request.rate() * request.seconds());
    }

    JsonObject run() throws Exception {
        peer.createTopic(request.topic(), request.queues());
        try (Peer.Reader reader = peer.reader(request.topic(), true);
                Peer.Writer writer = peer.writer(request.topic(), use())) {
            // The consumer stands at the end before the first message is sent, and both connections are there.
            reader.poll(500, (array, at, length) -> {});
            writer.send(message(-1));
            reader.poll(1000, (array, at, length) -> {});

            long start = System.nanoTime() + Sending.nanoseconds(0.1);
            long deadline = start + messages * intervalNs + Sending.nanoseconds(GRACE_S);
            CountDownLatch toCome = new CountDownLatch(messages);
            AtomicLong errors = new AtomicLong();
            AtomicLong last = new AtomicLong(start);
            Samples samples = new Samples();
            BitSet arrived = new BitSet(messages);
            AtomicBoolean ended = new AtomicBoolean();
            Threads.each(2, which -> {
                if (which == 0) {
                    produce(writer, start, deadline, errors);
                    long left = deadline - System.nanoTime();
                    toCome.await(Math.max(left, 0), TimeUnit.NANOSECONDS);
                    ended.set(true);
                } else {
                    while (!ended.get()) {
                        reader.poll(100, (array, at, length) -> {
                            long now = System.nanoTime();
                            long number = ByteBuffer.wrap(array, at, Long.BYTES).getLong();
                            if (number >= 0) {
                                arrived.set((int) number);
                                toCome.countDown();
                                last.set(now);
                                if (number >= warmUp) {
                                    samples.add(now - (start + number * intervalNs));
                                }
                            }
                        });
                    }
                }
                return null;
            });
            double seconds = (last.get() - (start + warmUp * intervalNs)) / 1e9;
            int received = samples.size();
            for (int number = arrived.nextClearBit(warmUp); number < messages; number = arrived.nextClearBit(number + 1)) {
                samples.add(deadline - (start + number * intervalNs));
            }
            JsonObject result = Sending.sent(received, Math.max(seconds, 1e-9), errors.get());
            result.addProperty("lost", toCome.getCount());
            result.add("latency_us", samples.microseconds());
            return result;
        }
    }

    private void produce(Peer.Writer writer, long start, long deadline, AtomicLong errors) throws Exception {
        for (long number = 0; number < messages; number++) {
            long planned = start + number * intervalNs;
            for (long now; (now = System.nanoTime()) < planned; ) {
                LockSupport.parkNanos(planned - now);
            }
            if (System.nanoTime() > deadline) {
                return;
            }
            writer.submit(message(number), null, error -> {
                if (error != null && errors.getAndIncrement() == 0) {
                    System.err.println("the first send that failed: " + error);
                }
            });
        }
    }

    private Peer.Use use() {
        return request.rate() > HIGHEST_SINGLE_RATE ? Peer.Use.RATE : Peer.Use.SINGLE;
    }

    private byte[] message(long number) {
        byte[] body = bodies.get(Math.max(number, 0)).clone();
        ByteBuffer.wrap(body).putLong(number);
        return body;
    }
}
