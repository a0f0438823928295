package mvcc_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

func putProposal(inc, seq, settled uint64, key, value string) *storev1.Proposal {
	return &storev1.Proposal{
		Id:  &storev1.ProposalID{Incarnation: inc, Sequence: seq, Settled: settled},
		Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: key, Value: []byte(value)}},
	}
}

func applyProposal(m *mvcc.Machine, p *storev1.Proposal) mvcc.Outcome {
	return m.Apply(mvcc.Entry{Term: 1, Command: batchCommand(p)}).Outcomes[0][0]
}

// A proposal that is in the log twice applies once, also across a snapshot. A proposal whose
// outcome was dropped is never applied again.
func TestRetryAppliesOnce(t *testing.T) {
	m := mvcc.New()
	first := applyProposal(m, putProposal(1, 1, 0, "/a", "1"))
	if again := applyProposal(m, putProposal(1, 1, 0, "/a", "1")); again != first || m.View().Revision() != 1 {
		t.Errorf("retry: %+v at revision %d, want %+v", again, m.View().Revision(), first)
	}
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
		t.Fatal(err)
	}
	m, _, err := mvcc.Load(&b)
	if err != nil {
		t.Fatal(err)
	}
	if again := applyProposal(m, putProposal(1, 1, 0, "/a", "1")); again != first || m.View().Revision() != 1 {
		t.Errorf("retry after a snapshot: %+v at revision %d", again, m.View().Revision())
	}
	applyProposal(m, putProposal(1, 2, 1, "/a", "2")) // settles the first
	if late := applyProposal(m, putProposal(1, 1, 0, "/a", "1")); !errors.Is(late.Err(), raftstore.ErrOutcomeUnknown) ||
		m.View().Revision() != 2 {
		t.Errorf("retry of a forgotten proposal: %+v at revision %d", late, m.View().Revision())
	}
}

// The stored outcomes are bounded, whatever the proposers do.
func TestMemoryOfProposalsIsBounded(t *testing.T) {
	m := mvcc.New()
	for inc := range uint64(5000) {
		applyProposal(m, putProposal(inc+1, 1, 0, "/a", "x"))
	}
	for seq := range uint64(70_000) {
		applyProposal(m, putProposal(99_999, seq+1, 0, "/a", "x"))
	}
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
		t.Fatal(err)
	}
	if m.Apply(
		mvcc.Entry{
			Command: &storev1.Command{Kind: &storev1.Command_Compact{
				Compact: &storev1.Compact{Revision: uint64(m.View().Revision())}}}}); true {
		b.Reset()
		if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
			t.Fatal(err)
		}
	}
	if b.Len() > 4<<20 {
		t.Errorf("snapshot of one key is %d bytes", b.Len())
	}
	if out := applyProposal(m, putProposal(99_999, 1, 0, "/a", "x")); !errors.Is(out.Err(),
		raftstore.ErrOutcomeUnknown) {
		t.Errorf("proposal beyond the bound: %+v", out)
	}
	if out := applyProposal(m, putProposal(99_999, 69_999, 0, "/a", "x")); out.Err() != nil {
		t.Errorf("recent proposal: %+v", out)
	}
}

// Stored conflicts are small, whatever the values. A retry returns the value as long as it can be
// read. Older snapshots contain the values.
func TestConflictIsRememberedWithoutValue(t *testing.T) {
	m := mvcc.New()
	big := strings.Repeat("v", 1<<20)
	applyProposal(m, putProposal(1, 1, 0, "/a", big))
	create := func(seq uint64) *storev1.Proposal {
		p := putProposal(2, seq, 0, "/a", "x")
		p.Ops[0].If = &storev1.Precondition{Absent: true}
		return p
	}
	const n = 50
	for seq := range uint64(n) {
		if out := applyProposal(m, create(seq+1)); out.Conflict == nil || out.Conflict.NoValue ||
			len(out.Conflict.Have.Value) != len(big) {
			t.Fatalf("conflict: %.200v", out.Conflict)
		}
	}
	shown := func(m *mvcc.Machine) string {
		out := applyProposal(m, create(7))
		if out.Conflict == nil || !out.Conflict.NoValue || out.Conflict.Have.Value != nil ||
			out.Conflict.Have.Modified != 1 || out.Conflict.At != 1 {
			t.Fatalf("remembered conflict: %.200v", out.Conflict)
		}
		out = out.WithValue(m.View())
		if out.Conflict.NoValue != (out.Conflict.Have.Value == nil) || out.Conflict.Have.Modified != 1 {
			t.Fatalf("filled conflict: %.200v", out.Conflict)
		}
		return string(out.Conflict.Have.Value)
	}
	if shown(m) != big {
		t.Error("a retry of a conflict about an unchanged item has no value")
	}
	applyProposal(m, putProposal(1, 2, 0, "/a", "2"))
	if shown(m) != big {
		t.Error("a retry of a conflict about an item in history has no value")
	}
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
		t.Fatal(err)
	}
	if b.Len() > 2*len(big) {
		t.Errorf("snapshot of one large value and %d conflicts about it is %d bytes", n, b.Len())
	}
	m.Apply(
		mvcc.Entry{Command: &storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: 2}}}})
	if v := shown(m); v != "" {
		t.Errorf("a retry of a conflict about a compacted item returns %.20q", v)
	}
	old := rewriteFrames(t, b.Bytes(), func(f *storev1.SnapshotFrame) {
		for _, r := range f.GetRecent().GetRecent() {
			if have := r.GetOutcome().GetHave(); have != nil {
				have.Value = []byte("as older versions wrote it")
			}
		}
	})
	loaded, _, err := mvcc.Load(bytes.NewReader(old))
	if err != nil {
		t.Fatal(err)
	}
	if shown(loaded) != big {
		t.Error("a retry after a snapshot has no value")
	}
	var again bytes.Buffer
	if err := loaded.Snapshot().Dump(&again, mvcc.Meta{}); err != nil || !bytes.Equal(again.Bytes(), b.Bytes()) {
		t.Errorf("a snapshot that was loaded with values differs when it is written again: %d bytes, was %d: %v",
			again.Len(), b.Len(), err)
	}
}

// An empty proposal returns the outcome of a fenced proposal, and has no other effect.
func TestProbe(t *testing.T) {
	m := mvcc.New()
	p := putProposal(1, 1, 0, "/a", "1")
	p.Fence = 1
	applied := applyProposal(m, p)
	probe := &storev1.Proposal{Id: p.Id, Fence: 1}
	if out := m.Apply(mvcc.Entry{Term: 2, Command: batchCommand(probe)}).Outcomes[0][0]; out != applied {
		t.Errorf("probe of an applied proposal: %+v, want %+v", out, applied)
	}
	probe = &storev1.Proposal{Id: &storev1.ProposalID{Incarnation: 1, Sequence: 2}, Fence: 1}
	if out := m.Apply(mvcc.Entry{Term: 2, Command: batchCommand(probe)}).Outcomes[0][0]; !errors.Is(out.Err(),
		raftstore.ErrFenced) {
		t.Errorf("probe of a lost proposal: %+v", out)
	}
	late := putProposal(1, 2, 0, "/a", "late")
	late.Fence = 2
	if out := m.Apply(mvcc.Entry{Term: 2, Command: batchCommand(late)}).Outcomes[0][0]; !errors.Is(out.Err(),
		raftstore.ErrFenced) {
		t.Errorf("proposal after its probe: %+v", out)
	}
}

// Events of a commit that is compacted in the same call are still returned.
func TestCompactionInTheSameBatch(t *testing.T) {
	m := mvcc.New()
	compact := &storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: 2}}}
	res := m.Apply(
		mvcc.Entry{Command: batchCommand(putProposal(1, 1, 0, "/a", "1"), putProposal(1, 2, 0, "/a", "2"))},
		mvcc.Entry{Command: compact},
		mvcc.Entry{Command: batchCommand(putProposal(1, 3, 0, "/a", "3"))})
	if len(res.Events) != 3 || res.Events[2].Revision != 3 || m.View().Compacted() != 2 {
		t.Errorf("events %+v", res.Events)
	}
}

func TestRebase(t *testing.T) {
	m := mvcc.New()
	applyProposal(m, putProposal(1, 1, 0, "/a", "1"))
	old := m.View()
	if err := m.Rebase(1000); err != nil {
		t.Fatal(err)
	}
	if err := m.Rebase(1000); err == nil {
		t.Error("revision may not stand still")
	}
	if _, err := m.View().Read(old.Revision(), 1); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("history from before: %v", err)
	}
	if out := applyProposal(m, putProposal(1, 2, 0, "/a", "2")); out.Revision != 1001 {
		t.Errorf("commit after rebase: %+v", out)
	}
	if it, _ := m.View().Get("/a"); it.Created != 1 || it.Modified != 1001 {
		t.Errorf("item %+v", it)
	}
}

// Amend changes a restored state in one revision, and in none if nothing changes.
func TestAmend(t *testing.T) {
	m := mvcc.New()
	applyProposal(m, putProposal(1, 1, 0, "/a", "1"))
	applyProposal(m, putProposal(1, 2, 0, "/b", "1"))
	m.Amend(raftstore.Put("/c", []byte("1")), raftstore.Put("/a", []byte("2")), raftstore.Delete("/b"))
	v := m.View()
	a, _ := v.Get("/a")
	c, _ := v.Get("/c")
	if _, ok := v.Get("/b"); ok || string(a.Value) != "2" || a.Created != 1 || a.Modified != 3 ||
		string(c.Value) != "1" || v.Revision() != 3 || v.Keys() != 2 || v.Bytes() != 6 {
		t.Errorf("amended: %+v %+v, revision %d, %d keys, %d bytes", a, c, v.Revision(), v.Keys(), v.Bytes())
	}
	if m.Amend(raftstore.Delete("/b")); m.View().Revision() != 3 {
		t.Errorf("nothing was changed, and the revision is %d", m.View().Revision())
	}
}

// A view never changes while the machine continues: readers need no lock.
func TestViewsAreStable(t *testing.T) {
	m := mvcc.New()
	var wg sync.WaitGroup
	for i := range 3000 {
		applyProposal(m, putProposal(1, uint64(i+1), uint64(i), fmt.Sprintf("/k/%d", i%97), fmt.Sprint(i)))
		if i%300 != 0 {
			continue
		}
		v := m.View()
		want := v.Hash()
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 20 {
				if v.Hash() != want {
					t.Errorf("view at %d changed", v.Revision())
					return
				}
				if _, err := v.List("/k/", raftstore.ListOptions{At: max(1, v.Revision()/2)}); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
}

// Every flipped bit and every truncation of a snapshot is detected.
func TestDamagedSnapshotIsRefused(t *testing.T) {
	good := sampleSnapshot(t)
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1 << (i % 8)
		if _, _, err := mvcc.Load(bytes.NewReader(bad)); err == nil {
			t.Fatalf("bit flipped in byte %d of %d not noticed", i, len(good))
		}
		if _, _, err := mvcc.Load(bytes.NewReader(good[:i])); !errors.Is(err, mvcc.ErrCorrupt) {
			t.Fatalf("cut after %d of %d bytes: %v", i, len(good), err)
		}
	}
}

func sampleSnapshot(t testing.TB) []byte {
	m := mvcc.New()
	for i := range 40 {
		p := putProposal(uint64(i%3+1), uint64(i+1), 0, fmt.Sprintf("/k/%d", i%7), "value")
		p.Ops[0].TtlMs = int64(i % 2 * 1000)
		if i%11 == 10 {
			p.Ops[0] = &storev1.Op{Kind: uint32(raftstore.OpDelete), Key: p.Ops[0].Key}
		}
		p.ProposedUnixMs, p.Id.IssuedUnixMs = int64(i*1000), int64(i*1000)
		applyProposal(m, p)
		if i%13 == 12 {
			m.Apply(mvcc.Entry{Command: alarmCommand(false,
				&storev1.Alarm{Kind: 2, Member: fmt.Sprint("r", i), SinceUnixMs: 9, Message: "differs"})})
		}
		if i == 20 {
			m.Apply(
				mvcc.Entry{
					Command: &storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: 15}}}})
		}
	}
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{Index: 40, Term: 2}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// stripChecksums removes the checksums from a snapshot, and addChecksums adds valid ones, so that a
// fuzzer can pass them.
func stripChecksums(snapshot []byte) (out []byte) {
	for len(snapshot) >= 8 {
		n := binary.LittleEndian.Uint32(snapshot)
		out = append(append(out, snapshot[:4]...), snapshot[8:8+n]...)
		snapshot = snapshot[8+n:]
	}
	return out
}

func addChecksums(payloads []byte) (out []byte) {
	sum := uint32(0)
	for len(payloads) >= 4 {
		n := min(binary.LittleEndian.Uint32(payloads), uint32(len(payloads)-4))
		body := payloads[4 : 4+n]
		payloads = payloads[4+n:]
		sum = crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), body)
		out = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(out, n), sum)
		out = append(out, body...)
	}
	return out
}

// rewriteFrames returns a snapshot with each frame changed.
func rewriteFrames(t *testing.T, snapshot []byte, change func(*storev1.SnapshotFrame)) []byte {
	var out []byte
	for rest := stripChecksums(snapshot); len(rest) > 0; {
		n := binary.LittleEndian.Uint32(rest)
		f := new(storev1.SnapshotFrame)
		if err := proto.Unmarshal(rest[4:4+n], f); err != nil {
			t.Fatal(err)
		}
		rest = rest[4+n:]
		change(f)
		body, err := proto.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(binary.LittleEndian.AppendUint32(out, uint32(len(body))), body...)
	}
	return addChecksums(out)
}

func FuzzLoad(f *testing.F) {
	if _, _, err := mvcc.Load(bytes.NewReader(addChecksums(stripChecksums(sampleSnapshot(f))))); err != nil {
		f.Fatal(err)
	}
	f.Add(stripChecksums(sampleSnapshot(f)))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		data = addChecksums(data)
		m, meta, err := mvcc.Load(bytes.NewReader(data))
		if err != nil {
			return
		}
		// A snapshot that loads is complete: dumping and loading it again returns the same state.
		var b bytes.Buffer
		if err := m.Snapshot().Dump(&b, meta); err != nil {
			t.Fatal(err)
		}
		again, _, err := mvcc.Load(&b)
		if err != nil || again.View().Hash() != m.View().Hash() {
			t.Fatalf("second load: %v", err)
		}
		if !slices.Equal(again.View().Alarms(), m.View().Alarms()) || again.View().Clock() != m.View().Clock() {
			t.Fatalf("second load: alarms %v at %d, were %v at %d", again.View().Alarms(), again.View().Clock(),
				m.View().Alarms(), m.View().Clock())
		}
	})
}

// Any command that decodes can be applied without a panic, and with the same result on every
// machine.
func FuzzApply(f *testing.F) {
	for _, c := range []*storev1.Command{
		batchCommand(putProposal(1, 1, 0, "/a", "1"), putProposal(1, 1, 0, "/a", "1"), putProposal(2, 1, 9, "/b", "")),
		{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: 5}}},
		{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: 1 << 63}}},
		alarmCommand(false, &storev1.Alarm{Kind: 1, Message: "full", SinceUnixMs: 1 << 62}),
		alarmCommand(true, &storev1.Alarm{Kind: 2, Member: "r1"}),
		{Kind: &storev1.Command_Alarm{Alarm: &storev1.SetAlarm{QuotaBytes: 1, GrowthBytes: 1 << 62,
			HistoryBytes: 1 << 62, Alarm: &storev1.Alarm{Kind: 1}}}},
		batchCommand(putIssuedAt(1, 1, 1, 1), putIssuedAt(2, 1<<63, 1<<62, 1<<62), putIssuedAt(1, 2, -5, -7)),
		{},
	} {
		data, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		cmd := new(storev1.Command)
		if proto.Unmarshal(data, cmd) != nil {
			return
		}
		a, b := mvcc.New(), mvcc.New()
		for range 2 {
			ra := a.Apply(mvcc.Entry{Term: 1, Command: cmd})
			rb := b.Apply(mvcc.Entry{Term: 1, Command: proto.Clone(cmd).(*storev1.Command)})
			if len(ra.Events) != len(rb.Events) || a.View().Hash() != b.View().Hash() {
				t.Fatal("two machines differ")
			}
			var sa, sb bytes.Buffer
			if a.Snapshot().Dump(&sa, mvcc.Meta{}) != nil || b.Snapshot().Dump(&sb, mvcc.Meta{}) != nil ||
				!bytes.Equal(sa.Bytes(), sb.Bytes()) {
				t.Fatal("snapshots of two machines differ")
			}
		}
	})
}
