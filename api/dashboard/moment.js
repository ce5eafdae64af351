// A moment in the time zone of the browser.
export default {
  template: `<time :datetime="moment.toISOString()">{{ moment.toLocaleString() }}</time>`,
  props: { when: { type: Number, required: true } }, // Unix seconds
  computed: {
    moment() {
      return new Date(1000 * this.when);
    },
  },
};
