// Text of a document, with marked words. Vue's interpolation shows all text as text.
export default {
  template: `<div class="text">{{ before }}<mark v-if="words">{{ words }}</mark>{{ after }}</div>`,
  props: { before: { type: String, required: true }, words: { type: String, default: "" }, after: { type: String, default: "" } },
};
