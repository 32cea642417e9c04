package commitmq.scenarios;

/** One everyday use of the clients. It has topics and groups of its own. */
@FunctionalInterface
public interface Scenario {
    /** What it saw: maps, lists, texts, numbers and booleans that are the same in each run. */
    Object run(Stage stage) throws Exception;
}
