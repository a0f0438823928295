package mvcc_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// dumpAndLoad returns the machine after a snapshot was written and loaded.
func dumpAndLoad(t testing.TB, m *mvcc.Machine) *mvcc.Machine {
	t.Helper()
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
		t.Fatal(err)
	}
	loaded, _, err := mvcc.Load(&b)
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

// putIssuedAt returns a put whose ID was issued at one time and which was proposed at another.
func putIssuedAt(inc, seq uint64, made, proposed int64) *storev1.Proposal {
	p := putProposal(inc, seq, 0, "/a", fmt.Sprint(inc, seq))
	p.Id.IssuedUnixMs, p.ProposedUnixMs = made, proposed
	return p
}

// A proposal whose outcome was dropped, by time or by number, is never applied again, also after a
// snapshot.
func TestForgottenIsNeverApplied(t *testing.T) {
	const start, window = int64(1_000_000), int64(mvcc.RememberMs)
	byTime := func(m *mvcc.Machine) {
		applyProposal(m, putIssuedAt(2, 1, start+window+1, start+window+1))
	}
	byNumber := func(m *mvcc.Machine) {
		for inc := range uint64(5000) {
			applyProposal(m, putIssuedAt(100+inc, 1, start+1, start+1))
		}
	}
	for name, forget := range map[string]func(*mvcc.Machine){"by time": byTime, "by number": byNumber} {
		for _, over := range []string{"", " over a snapshot"} {
			t.Run(name+over, func(t *testing.T) {
				m := mvcc.New()
				first := applyProposal(m, putIssuedAt(1, 1, start, start))
				if again := applyProposal(m, putIssuedAt(1, 1, start, start+window)); again != first {
					t.Fatalf("within the time: %+v, want %+v", again, first)
				}
				forget(m)
				if over != "" {
					m = dumpAndLoad(t, m)
				}
				before := m.View().Revision()
				late := applyProposal(m, putIssuedAt(1, 1, start, start+window+2))
				if !errors.Is(late.Err(), raftstore.ErrOutcomeUnknown) || m.View().Revision() != before {
					t.Errorf("forgotten proposal: %+v, revision went from %d to %d", late, before, m.View().Revision())
				}
				// The proposer itself can continue.
				if out := applyProposal(m, putIssuedAt(1, 2, start+window+2, start+window+2)); out.Err() != nil {
					t.Errorf("new proposal of the forgotten proposer: %v", out.Err())
				}
				if again := applyProposal(m, putIssuedAt(1, 1, start, start+window+3)); !errors.Is(again.Err(),
					raftstore.ErrOutcomeUnknown) {
					t.Errorf("forgotten proposal of a proposer that is known again: %+v", again)
				}
			})
		}
	}
}

// An outcome that was never settled is dropped after a time even if its proposer continues.
func TestUnsettledOutcomesAgeAway(t *testing.T) {
	m := mvcc.New()
	for seq := range uint64(1000) {
		applyProposal(m, putIssuedAt(1, seq+1, 1_000_000, 1_000_000))
	}
	applyProposal(m, putIssuedAt(1, 1001, 1_000_000, 1_000_001+mvcc.RememberMs))
	m.Apply(
		mvcc.Entry{
			Command: &storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: 1 << 40}}}})
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
		t.Fatal(err)
	}
	if b.Len() > 1024 {
		t.Errorf("snapshot of one key and one outcome is %d bytes", b.Len())
	}
}

func alarmCommand(clear bool, a *storev1.Alarm) *storev1.Command {
	return &storev1.Command{Kind: &storev1.Command_Alarm{Alarm: &storev1.SetAlarm{Clear: clear, Alarm: a}}}
}

// While the space alarm is active, puts of new keys are refused, whatever else is in the commit.
// Deletes and checks are accepted, and the error contains the alarm's message. An alarm without
// limits, from an older release, refuses every put.
func TestSpaceAlarmRefusesPuts(t *testing.T) {
	m := mvcc.New()
	applyProposal(m, putProposal(1, 1, 0, "/a", "x"))
	applyProposal(m, putProposal(1, 2, 0, "/b", "x"))
	m.Apply(mvcc.Entry{Command: alarmCommand(false,
		&storev1.Alarm{Kind: uint32(raftstore.AlarmSpace), Message: "quota of 7 bytes: delete something"})})
	m = dumpAndLoad(t, m)
	refusedPut := putProposal(1, 3, 0, "/c", "x")
	refusedPut.Ops = append([]*storev1.Op{{Kind: uint32(raftstore.OpDelete), Key: "/a"}}, refusedPut.Ops...)
	err := applyProposal(m, refusedPut).Err()
	if !errors.Is(err, raftstore.ErrNoSpace) || !strings.Contains(err.Error(), `"/c"`) ||
		!strings.Contains(err.Error(), "quota of 7 bytes: delete something") {
		t.Errorf("put while space is short: %v", err)
	}
	if out, full := m.View().NoSpace(refusedPut); !full || out.Err().Error() != err.Error() {
		t.Errorf("a view says of it: %v, refused %t", out.Err(), full)
	}
	if _, ok := m.View().Get("/a"); !ok {
		t.Error("a refused commit deleted something")
	}
	gone := putProposal(1, 4, 0, "/b", "")
	gone.Ops = []*storev1.Op{{Kind: uint32(raftstore.OpDelete), Key: "/b"},
		{Kind: uint32(raftstore.OpCheck), Key: "/a"}}
	if out := applyProposal(m, gone); out.Err() != nil {
		t.Errorf("delete while space is short: %v", out.Err())
	}
	if out := applyProposal(m, putProposal(1, 6, 0, "/a", "y")); !errors.Is(out.Err(), raftstore.ErrNoSpace) {
		t.Errorf("put in place of a value under an alarm without limits: %v", out.Err())
	}
	if again := applyProposal(m, refusedPut).Err(); !errors.Is(again, raftstore.ErrNoSpace) {
		t.Errorf("retry of the refused put: %v", again)
	}
	m.Apply(mvcc.Entry{Command: alarmCommand(true, &storev1.Alarm{Kind: uint32(raftstore.AlarmSpace)})})
	if out := applyProposal(m, putProposal(1, 5, 0, "/c", "x")); out.Err() != nil || len(m.View().Alarms()) != 0 {
		t.Errorf("put after the alarm: %v, alarms %v", out.Err(), m.View().Alarms())
	}
}

// Raising an alarm again does not raise its limits. History that is compacted for an update of the
// same batch still reaches the watchers.
func TestSpaceAlarmKeepsItsLimits(t *testing.T) {
	m := mvcc.New()
	applyProposal(m, putProposal(1, 1, 0, "/a", "1234567"))
	raise := func(growth int64) {
		m.Apply(mvcc.Entry{Command: &storev1.Command{Kind: &storev1.Command_Alarm{Alarm: &storev1.SetAlarm{
			QuotaBytes: 5, GrowthBytes: growth, HistoryBytes: 30,
			Alarm: &storev1.Alarm{Kind: uint32(raftstore.AlarmSpace), StateLimit: 1 << 40, TotalLimit: 1 << 40}}}}})
	}
	raise(1)
	raise(1000)
	m = dumpAndLoad(t, m)
	if a := m.View().Alarms()[0]; a.StateLimit != 9+1 || a.TotalLimit != 9+1+30 {
		t.Fatalf("limits %d and %d of an alarm that was raised with 9 bytes of state and 1 and 30 to grow by",
			a.StateLimit, a.TotalLimit)
	}
	if out := applyProposal(m, putProposal(1, 2, 0, "/a", "123456789")); !errors.Is(out.Err(), raftstore.ErrNoSpace) ||
		!strings.Contains(out.Err().Error(), "to 11 bytes, beyond the limit of 10") {
		t.Errorf("growing by two bytes: %v", out.Err())
	}
	var updates []*storev1.Proposal
	for i := range uint64(20) {
		updates = append(updates, putProposal(1, 3+i, 0, "/a", fmt.Sprintf("%08d", i)))
	}
	res := m.Apply(mvcc.Entry{Command: batchCommand(updates...)})
	if len(res.Events) != 20 || res.Events[0].Revision != 2 ||
		string(res.Events[19].Events[0].Item.Value) != "00000019" {
		t.Errorf("20 updates in a batch: %d revisions reach the watchers", len(res.Events))
	}
	v := m.View()
	if _, err := v.Read(v.Revision()-1, 1); err != nil || v.Compacted() < 18 || v.Bytes()+v.HistoryBytes() > 40 {
		t.Errorf("%d of state, %d of history, compacted up to %d of %d: %v", v.Bytes(), v.HistoryBytes(), v.Compacted(),
			v.Revision(), err)
	}
}

// Alarms cannot fill the state, and unknown kinds are ignored.
func TestAlarmsAreBounded(t *testing.T) {
	m := mvcc.New()
	for i := range 1000 {
		m.Apply(mvcc.Entry{Command: alarmCommand(false,
			&storev1.Alarm{Kind: 2, Member: fmt.Sprint("r", i), Message: strings.Repeat("x", 1<<20)})},
			mvcc.Entry{Command: alarmCommand(false, &storev1.Alarm{Kind: 2, Member: strings.Repeat("r", 1<<20)})},
			mvcc.Entry{Command: alarmCommand(false,
				&storev1.Alarm{Kind: 2, Member: fmt.Sprint("u", i), Message: strings.Repeat("x", 1023) + "ü"})},
			mvcc.Entry{Command: alarmCommand(false, &storev1.Alarm{Kind: 77})})
	}
	var b bytes.Buffer
	if err := m.Snapshot().Dump(&b, mvcc.Meta{}); err != nil {
		t.Fatal(err)
	}
	if n := len(m.View().Alarms()); n != 64 || b.Len() > 128<<10 {
		t.Errorf("%d alarms, snapshot of %d bytes", n, b.Len())
	}
}

// The clock does not go backwards when the next leader's clock is behind, so a key's TTL does not
// change.
func TestTimeNeverRunsBackwards(t *testing.T) {
	m := mvcc.New()
	at := func(now int64) *storev1.Proposal {
		p := putProposal(1, uint64(now), 0, "/k", "x")
		p.ProposedUnixMs, p.Ops[0].TtlMs = now, 500
		return p
	}
	applyProposal(m, at(10_000))
	applyProposal(m, at(4_000)) // a leader whose clock is behind
	if it, _ := m.View().Get("/k"); it.Expires != 10_500 || m.View().Clock() != 10_000 {
		t.Errorf("expires at %d by a clock of %d", it.Expires, m.View().Clock())
	}
	expire := func(until int64) {
		m.Apply(
			mvcc.Entry{
				Command: &storev1.Command{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: until}}}})
	}
	expire(9_000)
	expire(10_499)
	if _, ok := m.View().Get("/k"); !ok {
		t.Error("expired too early")
	}
	m = dumpAndLoad(t, m)
	expire(10_500)
	if _, ok := m.View().Get("/k"); ok {
		t.Error("still there")
	}
	// The longest TTL does not overflow.
	long := at(20_000)
	long.Ops[0].TtlMs = 1<<63 - 1
	applyProposal(m, long)
	expire(1 << 60)
	if _, ok := m.View().Get("/k"); !ok {
		t.Error("a key with the longest TTL has expired")
	}
}

// A pager that requests its first revision sees one state, whatever is committed meanwhile, until
// that revision is compacted. Then it receives an error with the compacted revision.
func TestPagingOverAFixedSnapshot(t *testing.T) {
	m := mvcc.New()
	seq := uint64(0)
	write := func(key, value string) {
		seq++
		applyProposal(m, putProposal(1, seq, seq-1, key, value))
	}
	for i := range 20 {
		write(fmt.Sprintf("/p/%02d", i), "before")
	}
	first, err := m.View().List("/p/", raftstore.ListOptions{Limit: 7})
	if err != nil {
		t.Fatal(err)
	}
	compact := func(upTo raftstore.Revision) {
		m.Apply(
			mvcc.Entry{
				Command: &storev1.Command{
					Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}}})
	}
	got := first.Items
	for page := first; page.More; {
		for i := range 20 {
			write(fmt.Sprintf("/p/%02d", i), "after")
			write(fmt.Sprintf("/p/%02d-new", i), "after")
		}
		compact(first.Revision) // compact up to the pager's revision, which stays readable
		if page, err = m.View().List("/p/", raftstore.ListOptions{Limit: 7, At: first.Revision,
			After: got[len(got)-1].Key}); err != nil {
			t.Fatal(err)
		}
		got = append(got, page.Items...)
		if want := int64(20 - len(got)); page.Remaining != want || page.Revision != first.Revision {
			t.Errorf("%d remain at revision %d, want %d at %d", page.Remaining, page.Revision, want, first.Revision)
		}
	}
	for i, it := range got {
		if it.Key != fmt.Sprintf("/p/%02d", i) || string(it.Value) != "before" {
			t.Errorf("item %d is %s = %s", i, it.Key, it.Value)
		}
	}
	if len(got) != 20 {
		t.Errorf("%d items", len(got))
	}
	compact(first.Revision + 1)
	_, err = m.View().List("/p/", raftstore.ListOptions{Limit: 7, At: first.Revision})
	if !errors.Is(err, raftstore.ErrCompacted) ||
		!strings.Contains(err.Error(), fmt.Sprintf("compacted up to %d", first.Revision+1)) {
		t.Errorf("page of a compacted revision: %v", err)
	}
	now := m.View().Revision()
	_, err = m.View().List("/p/", raftstore.ListOptions{At: now + 5})
	if !errors.Is(err, raftstore.ErrFutureRevision) || !strings.Contains(err.Error(), fmt.Sprint(now+5)) ||
		!strings.Contains(err.Error(), fmt.Sprint(now)) {
		t.Errorf("list of a future revision: %v", err)
	}
	for at, want := range map[raftstore.Revision]error{first.Revision: raftstore.ErrCompacted,
		now + 1: raftstore.ErrFutureRevision} {
		if _, err := m.View().HashAt(at, func(int) error { return nil }); !errors.Is(err, want) {
			t.Errorf("hash of revision %d: %v", at, err)
		}
	}
}

// BenchmarkApply measures one proposal in a batch of 64, without raft.
func BenchmarkApply(b *testing.B) {
	m := mvcc.New()
	value := make([]byte, 1024)
	seq := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		batched := make([]*storev1.Proposal, 64)
		for i := range batched {
			seq++
			batched[i] = &storev1.Proposal{
				Id: &storev1.ProposalID{Incarnation: 1, Sequence: seq, Settled: seq - min(seq, 64),
					IssuedUnixMs: int64(seq)},
				Ops: []*storev1.Op{{Kind: uint32(raftstore.OpPut), Key: fmt.Sprintf("/bench/%d", seq%50_000),
					Value: value}},
				ProposedUnixMs: int64(seq),
			}
		}
		m.Apply(mvcc.Entry{Term: 1, Command: batchCommand(batched...)})
		if seq%(1<<14) < 64 {
			m.Apply(
				mvcc.Entry{Command: &storev1.Command{
					Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: seq - min(seq, 20_000)}}}})
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(max(1, seq)), "ns/proposal")
}

// Compacted values are freed, also if later revisions of the same segment are retained.
func TestCompactedValuesAreFreed(t *testing.T) {
	const revisions, size = 200, 256 << 10
	m := mvcc.New()
	put := func(n int) mvcc.Entry {
		return mvcc.Entry{Term: 1,
			Command: &storev1.Command{
				Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{{
					Ops: []*storev1.Op{{Kind: 1, Key: fmt.Sprint("/k/", n%3), Value: make([]byte, size)}},
				}}}}}}
	}
	heap := func() uint64 {
		var s runtime.MemStats
		runtime.GC()
		runtime.GC() // frees objects with finalizers and pools of earlier tests too
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	before := heap()
	for n := range revisions {
		m.Apply(put(n))
	}
	// The measurement includes the values. It covers the whole process, in which memory of other
	// tests may be freed.
	if grown := int64(heap() - before); grown < revisions*size*9/10 {
		t.Fatalf("%d revisions of %d bytes take %d bytes", revisions, size, grown)
	}
	m.Apply(
		mvcc.Entry{
			Command: &storev1.Command{
				Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: revisions - 5}}}})
	if grown := int64(heap() - before); grown > 20*size {
		t.Errorf("three values and five old ones of %d bytes take %d bytes", size, grown)
	}
	l, err := m.View().List("/k/", raftstore.ListOptions{At: revisions - 5})
	if err != nil || len(l.Items) != 3 || l.Items[0].Modified != revisions-5-(revisions-5-1)%3 {
		t.Errorf("list at the compacted revision: %+v, error %v", l, err)
	}
	runtime.KeepAlive(m)
}
