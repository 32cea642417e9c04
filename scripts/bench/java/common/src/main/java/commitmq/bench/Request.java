package commitmq.bench;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;

/** What a driver is asked to do: the JSON object of its command line. */
public final class Request {
    /** Java compiles a program while it runs, and is slow until it has: it gets so many times the warm-up of others. */
    private static final double WARM_UP_FACTOR = 3;

    private final JsonObject fields;

    public Request(String json) {
        fields = JsonParser.parseString(json).getAsJsonObject();
    }

    /** {@code host:port} of the server. */
    public String address() {
        return text("address", null);
    }

    public String work() {
        return text("work", null);
    }

    public String topic() {
        return text("topic", null);
    }

    /** Queues (partitions) the topic gets when this driver creates it. */
    public int queues() {
        return (int) number("queues", 1);
    }

    public int bodyBytes() {
        return (int) number("body_bytes", 1024);
    }

    public int clients() {
        return (int) number("clients", 1);
    }

    public long seed() {
        return number("seed", 1);
    }

    /** Messages of the measurement, in all. */
    public long messages() {
        return number("messages", -1);
    }

    /** Messages in one batch. */
    public int batch() {
        return (int) number("batch", 1000);
    }

    /** Single messages that may wait for their acknowledgement at a time. */
    public int window(int otherwise) {
        return (int) number("window", otherwise);
    }

    public double seconds() {
        return real("seconds", Double.NaN);
    }

    /** Seconds of the same work before the clock starts, so that both JVMs have compiled what is measured. */
    public double warmupSeconds() {
        return WARM_UP_FACTOR * real("warmup_s", 1.0);
    }

    /** Messages a second. */
    public double rate() {
        return real("rate", Double.NaN);
    }

    /** Key lookups. */
    public int count() {
        return (int) number("count", 1000);
    }

    /** So long before its time of delivery a message is sent. */
    public double aheadSeconds() {
        return real("ahead_s", 10.0);
    }

    /** The delay before a message is handled again. */
    public long delayMs() {
        return number("delay_ms", 1000);
    }

    public double timeoutSeconds() {
        return real("timeout_s", 120);
    }

    private String text(String name, String otherwise) {
        return present(name, otherwise) ? fields.get(name).getAsString() : otherwise;
    }

    private long number(String name, long otherwise) {
        return present(name, otherwise) ? fields.get(name).getAsLong() : otherwise;
    }

    private double real(String name, double otherwise) {
        return present(name, otherwise) ? fields.get(name).getAsDouble() : otherwise;
    }

    private boolean present(String name, Object otherwise) {
        JsonElement element = fields.get(name);
        boolean present = element != null && !element.isJsonNull();
        boolean required = otherwise == null || otherwise.equals(-1L) || otherwise.equals(Double.NaN);
        if (!present && required) {
            throw new IllegalArgumentException("the request has no \"" + name + "\": " + fields);
        }
        return present;
    }
}
