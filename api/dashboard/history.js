// The latest questions at the side of the conversation; folded where the page is narrow. Vue's interpolation shows all
// text as text.
export default {
  template: `
    <details class="history" :open="open">
      <summary>History<small v-if="items.length"> · {{ items.length }}</small></summary>
      <p v-if="!items.length" class="note">Your questions will be listed here until the service restarts.</p>
      <ol>
        <li v-for="item in items" :key="item.id">
          <button type="button" :aria-current="item.id === shown" @click="$emit('open', item.id)">
            <b>{{ item.question }}</b><span>{{ item.answer }}</span><small>{{ at(item.when) }}</small>
          </button>
        </li>
      </ol>
    </details>`,
  props: { items: { type: Array, required: true }, shown: { type: String, default: "" } },
  emits: ["open"],
  data: () => ({ open: window.matchMedia("(min-width: 60rem)").matches }),
  methods: {
    at(when) {
      const moment = new Date(1000 * when), today = moment.toDateString() === new Date().toDateString();
      return today ? moment.toLocaleTimeString() : moment.toLocaleString();
    },
  },
};
