package commitmq.bench;

import com.google.gson.JsonObject;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;

/** Each client sends a message in a transaction, commits it, and so on. */
final class Transactions {
    private static final double VISIBLE_S = 10;

    private final Request request;
    private final Peer peer;
    private final Bodies bodies;

    Transactions(Request request, Peer peer) {
        this.request = request;
        this.peer = peer;
        this.bodies = new Bodies(request.bodyBytes(), request.seed());
    }

    /** The clock runs until a consumer could read every committed message: clients do not wait for that. Those that are
     * not there some seconds later count as failed, and the clock ends with the last one that came. */
    JsonObject run() throws Exception {
        String topic = request.topic();
        peer.createTopic(topic, request.queues());
        try (Semantics.Transactor transactor = peer.semantics().transactor(topic)) {
            AtomicLong errors = new AtomicLong();
            commit(transactor, request.warmupSeconds(), errors);
            long before = settled(topic);
            errors.set(0);
            long began = System.nanoTime();
            Samples samples = commit(transactor, request.seconds(), errors);
            long[] seen = visible(topic, before + samples.size());
            long there = seen[0] - before;
            JsonObject result = Sending.sent(there, (seen[1] - began) / 1e9, errors.get() + samples.size() - there);
            result.add("latency_us", samples.microseconds());
            return result;
        }
    }

    private Samples commit(Semantics.Transactor transactor, double seconds, AtomicLong errors) throws Exception {
        AtomicLong numbers = new AtomicLong();
        long until = System.nanoTime() + Sending.nanoseconds(seconds);
        List<Samples> found = Threads.each(request.clients(), client -> {
            Samples samples = new Samples();
            for (long before = System.nanoTime(); before < until; ) {
                try {
                    transactor.commit(bodies.get(numbers.getAndIncrement()));
                    samples.add(System.nanoTime() - before);
                } catch (Exception error) {
                    if (errors.getAndIncrement() == 0) {
                        System.err.println("the first transaction that failed: " + error);
                    }
                }
                before = System.nanoTime();
            }
            return samples;
        });
        Samples all = new Samples();
        found.forEach(all::addAll);
        return all;
    }

    /** Waits until nothing has come for half a second; returns how many there are. */
    private long settled(String topic) throws Exception {
        long readable = peer.readable(topic);
        for (long before = -1; readable != before; ) {
            before = readable;
            Thread.sleep(500);
            readable = peer.readable(topic);
        }
        return readable;
    }

    /** How many can be read once all can, or at the end of the time, and when the last one of them came. */
    private long[] visible(String topic, long wanted) throws Exception {
        long last = peer.readable(topic);
        long came = System.nanoTime();
        while (last < wanted && System.nanoTime() < came + Sending.nanoseconds(VISIBLE_S)) {
            Thread.sleep(1);
            long now = peer.readable(topic);
            if (now != last) {
                last = now;
                came = System.nanoTime();
            }
        }
        return new long[] {last, came};
    }
}
