package mvcc

import (
	"fmt"
	"testing"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// BenchmarkApplySpread applies batches of 40 puts of 1 KiB to 25,000 keys, with
// history compacted as the leader does.
func BenchmarkApplySpread(b *testing.B) {
	m := New()
	keys := make([]string, 25_000)
	for i := range keys {
		keys[i] = fmt.Sprintf("/registry/pods/namespace-%d/pod-%d", i%50, i*7919%len(keys))
	}
	value := make([]byte, 1024)
	next := 0
	batch := func() Entry {
		ps := make([]*storev1.Proposal, 40)
		for i := range ps {
			ps[i] = &storev1.Proposal{Ops: []*storev1.Op{{Kind: 1, Key: keys[next*7%len(keys)], Value: value}}}
			next++
		}
		return Entry{Term: 1,
			Command: &storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: ps}}}}
	}
	for range 1000 {
		m.Apply(batch())
	}
	b.ReportAllocs()
	for b.Loop() {
		m.Apply(batch())
		if v := m.View(); v.Revision()-v.Compacted() > 21_000 {
			m.compactHistory(v.Revision() - 20_000)
		}
	}
}
