package commitmq.bench;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;

/** What a system's clients are given: a JSON object of sections, each with settings by their own names. All else is as it
 * comes, and the same object is what the benchmark reports. */
public final class Settings {
    private final JsonObject sections;

    public Settings(String json) {
        sections = JsonParser.parseString(json).getAsJsonObject();
    }

    /** A writer's: those of "producer" and, stronger, those of "producer, USE". */
    public Properties producer(Peer.Use use) {
        return of("producer", "producer, " + use.name().toLowerCase(Locale.ROOT));
    }

    public Properties consumer() {
        return of("consumer");
    }

    /** Of consumers that call a handler. */
    public Properties handler() {
        return of("handler");
    }

    public Properties admin() {
        return of("admin");
    }

    private Properties of(String... names) {
        Properties found = new Properties();
        for (String name : names) {
            if (sections.has(name)) {
                for (Map.Entry<String, JsonElement> one : sections.getAsJsonObject(name).entrySet()) {
                    found.setProperty(one.getKey(), one.getValue().getAsString());
                }
            }
        }
        return found;
    }
}
