package commitmq.bench;

import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.util.BitSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;

/** An open loop: one thread sends at a fixed rate, another receives; a message's latency counts from when it should have
 * been sent, so that a system that falls behind cannot hide it. */
final class EndToEnd {
    /** After the planned end, so long may a slow system still take. What has not arrived then is counted as lost, and its latency
     * as the time until then, so that the percentiles of a system that cannot keep up are lower bounds. */
    private static final double GRACE_S = 10;

    /** Messages a second that each of the compared systems can send one by one on a small machine. */
    private static final double HIGHEST_SINGLE_RATE = 2000;

    /** The number of the message before those that count. */
    private static final long FIRST = -1;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;
    /** Which run a message is of: a consumer group may have some of an earlier one to do. */
    private final long stamp = System.nanoTime();

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

    /** The consumer polls. */
    JsonObject polled() throws Exception {
        peer.createTopic(request.topic(), request.queues());
        try (Peer.Reader reader = peer.reader(request.topic(), true);
                Peer.Writer writer = peer.writer(request.topic(), use())) {
            // The consumer stands at the end before the first message is sent, and both connections are there.
            reader.poll(500, (array, at, length) -> {});
            writer.send(message(FIRST));
            reader.poll(1000, (array, at, length) -> {});

            Arrivals arrivals = new Arrivals();
            AtomicBoolean ended = new AtomicBoolean();
            Threads.each(2, which -> {
                if (which == 0) {
                    produce(writer, arrivals);
                    arrivals.await();
                    ended.set(true);
                } else {
                    while (!ended.get()) {
                        reader.poll(100, (array, at, length) -> {
                            long now = System.nanoTime();
                            arrivals.take(ByteBuffer.wrap(array, at, Long.BYTES).getLong(), now);
                        });
                    }
                }
                return null;
            });
            return arrivals.result();
        }
    }

    /** The consumer's client calls a handler, on threads of its own. */
    JsonObject pushed() throws Exception {
        peer.createTopic(request.topic(), request.queues());
        CountDownLatch began = new CountDownLatch(1);
        AtomicReference<Arrivals> measured = new AtomicReference<>();
        Semantics.Handler handler = (body, tries) -> {
            long now = System.nanoTime();
            ByteBuffer read = ByteBuffer.wrap(body);
            long number = read.getLong();
            if (read.getLong() == stamp) {
                Arrivals arrivals = measured.get();
                if (number == FIRST) {
                    began.countDown();
                } else if (arrivals != null) {
                    arrivals.take(number, now);
                }
            }
            return true;
        };
        String group = request.topic() + "-group";
        try (AutoCloseable handling = peer.semantics().handling(request.topic(), group, handler);
                Peer.Writer writer = peer.writer(request.topic(), use())) {
            writer.send(message(FIRST));
            if (!began.await((long) request.timeoutSeconds(), TimeUnit.SECONDS)) {
                throw new IllegalStateException("the handler did not get the first message");
            }
            Arrivals arrivals = new Arrivals();
            measured.set(arrivals);
            produce(writer, arrivals);
            arrivals.await();
            return arrivals.result();
        }
    }

    /** Which messages came, and when. A handler is called by several threads. */
    private final class Arrivals {
        private final long start = System.nanoTime() + Sending.nanoseconds(0.1);
        private final long deadline = start + messages * intervalNs + Sending.nanoseconds(GRACE_S);
        private final CountDownLatch toCome = new CountDownLatch(messages);
        private final AtomicLong errors = new AtomicLong();
        private final Samples samples = new Samples();
        private final BitSet arrived = new BitSet(messages);
        private long last = start;

        synchronized void take(long number, long now) {
            if (number < 0 || arrived.get((int) number)) {
                return; // a group may get a message again
            }
            arrived.set((int) number);
            toCome.countDown();
            last = Math.max(last, now);
            if (number >= warmUp) {
                samples.add(now - (start + number * intervalNs));
            }
        }

        /** Waits until all came, or until the end of the time. */
        void await() throws InterruptedException {
            toCome.await(Math.max(deadline - System.nanoTime(), 0), TimeUnit.NANOSECONDS);
        }

        synchronized JsonObject result() {
            double seconds = (last - (start + warmUp * intervalNs)) / 1e9;
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

    private void produce(Peer.Writer writer, Arrivals arrivals) throws Exception {
        for (long number = 0; number < messages; number++) {
            long planned = arrivals.start + number * intervalNs;
            for (long now; (now = System.nanoTime()) < planned; ) {
                LockSupport.parkNanos(planned - now);
            }
            if (System.nanoTime() > arrivals.deadline) {
                return;
            }
            writer.submit(message(number), null, error -> {
                if (error != null && arrivals.errors.getAndIncrement() == 0) {
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
        ByteBuffer.wrap(body).putLong(number).putLong(stamp);
        return body;
    }
}
