// The latest questions at the side of the conversation; folded where the page is narrow. Questions of the page and of the
// API are listed apart. Vue's interpolation shows all text as text.
const PAUSE = 250; // milliseconds without a key until the words are sought
const WIDE = window.matchMedia("(min-width: 60rem)");
const ORIGINS = { page: "Page", api: "API" };

export default {
  template: `
    <details class="history" :open="open" @toggle="open = $event.target.open">
      <summary>History</summary>
      <div class="finding">
        <input type="search" v-model="words" placeholder="Search" aria-label="Search the history" maxlength="200">
        <div role="group" aria-label="Asked with"><button v-for="(label, name) in ORIGINS" :key="name" type="button"
          :aria-pressed="origin === name" @click="origin = name">{{ label }}</button></div>
      </div>
      <p v-if="!items.length" class="note">{{ words ? "No question or answer has these words." : EMPTY[origin] }}</p>
      <ol>
        <li v-for="item in items" :key="item.id">
          <button type="button" class="entry" :aria-current="item.id === shown" @click="choose(item.id)">
            <b>{{ item.question }}</b><span>{{ item.answer }}</span><small>{{ at(item.when) }}<q-icon v-if="item.rating"
            :name="'thumb_' + item.rating" :aria-label="item.rating === 'up' ? 'Good answer' : 'Bad answer'"></q-icon></small>
          </button>
          <button type="button" class="drop-entry" :aria-label="'Delete from the history: ' + item.question" @click="$emit('remove', item.id)"><q-icon name="close"></q-icon></button>
        </li>
      </ol>
    </details>`,
  props: { items: { type: Array, required: true }, shown: { type: String, default: "" } },
  emits: ["open", "remove", "search"],
  data: () => ({
    open: WIDE.matches,
    words: "",
    origin: "page",
    timer: 0,
    ORIGINS,
    EMPTY: {
      page: "Your questions will be listed here until the service restarts.",
      api: "Questions of programs will be listed here until the service restarts.",
    },
  }),
  watch: {
    words() {
      clearTimeout(this.timer);
      this.timer = setTimeout(this.search, PAUSE);
    },
    origin() {
      this.search();
    },
  },
  mounted() {
    WIDE.addEventListener("change", this.fold);
  },
  unmounted() {
    WIDE.removeEventListener("change", this.fold);
  },
  methods: {
    fold() {
      this.open = WIDE.matches; // where the page is narrow, the list would leave the answers no room
    },
    choose(id) {
      this.$emit("open", id);
      this.fold();
    },
    search() {
      this.$emit("search", { words: this.words, origin: this.origin });
    },
    at(when) {
      const moment = new Date(1000 * when), today = moment.toDateString() === new Date().toDateString();
      return today ? moment.toLocaleTimeString() : moment.toLocaleString();
    },
  },
};
