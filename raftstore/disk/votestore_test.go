package disk

import (
	"testing"

	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
)

// memoryRecord is a RecordStore in memory that counts its writes.
type memoryRecord struct {
	content []byte
	writes  int
}

func (m *memoryRecord) Get([]byte) ([]byte, error) {
	if m.content == nil {
		return nil, raftboltdb.ErrKeyNotFound
	}
	return m.content, nil
}

func (m *memoryRecord) Set(_, value []byte) error {
	m.content = value
	m.writes++
	return nil
}

func openBallot(t *testing.T, m *memoryRecord) *voteStore {
	t.Helper()
	s, err := openStableStore(m, "memory", func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	return &voteStore{stableStore: s}
}

func (b *voteStore) requireVote(t *testing.T, term uint64, who string) {
	t.Helper()
	gotTerm, err := b.GetUint64([]byte(keyVoteTerm))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := b.Get([]byte(keyVoteCandidate)); err != nil || string(got) != who || gotTerm != term {
		t.Fatalf("vote of term %d for %q, %v; want term %d for %q", gotTerm, got, err, term, who)
	}
}

// TestVoteIsOneWrite: a vote is one write, and a crash leaves the previous or the new vote.
func TestVoteIsOneWrite(t *testing.T) {
	disk := &memoryRecord{content: stableRecord{owner: "r1", kind: LogBolt}.encodeRecord()}
	b := openBallot(t, disk)
	vote := func(b *voteStore, term uint64, who string) {
		t.Helper()
		before := disk.writes
		if err := b.SetUint64([]byte(keyVoteTerm), term); err != nil {
			t.Fatal(err)
		}
		if disk.writes != before {
			t.Fatal("the term alone was written")
		}
		if got, err := b.GetUint64([]byte(keyVoteTerm)); err != nil || got != term {
			t.Fatalf("term of the vote being cast is %d, %v", got, err)
		}
		if err := b.Set([]byte(keyVoteCandidate), []byte(who)); err != nil {
			t.Fatal(err)
		}
		if disk.writes != before+1 {
			t.Fatalf("%d writes", disk.writes-before)
		}
	}
	vote(b, 3, "r2")
	b.requireVote(t, 3, "r2")
	b = openBallot(t, disk)
	b.requireVote(t, 3, "r2")
	if err := b.SetUint64([]byte(keyVoteTerm), 4); err != nil {
		t.Fatal(err)
	}
	b = openBallot(t, disk) // a crash
	b.requireVote(t, 3, "r2")
	vote(b, 5, "r1")
	if err := b.SetUint64(keyTerm, 6); err != nil {
		t.Fatal(err)
	}
	openBallot(t, disk).requireVote(t, 5, "r1")
	if term, err := openBallot(t, disk).GetUint64(keyTerm); err != nil || term != 6 {
		t.Fatalf("term %d, %v", term, err)
	}
}
