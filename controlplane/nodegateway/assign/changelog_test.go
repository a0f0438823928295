package assign

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/internal/wait"
)

func service(i int) key { return key{kindService, "default", fmt.Sprint("s", i)} }

func serviceNotice(i int, uid string, gone bool) logEntry {
	n := logEntry{key: service(i), uid: types.UID(uid)}
	if !gone {
		n.encoded = []byte{0}
	}
	return n
}

// since reads all changes after a position.
func since(b *changeLog, at uint64) (all []logEntry, now uint64, err error) {
	now, _, err = b.readSince(readRequest{at: at, visit: func(n *logEntry) { all = append(all, *n) }})
	return all, now, err
}

// A reader gets every change since its last read once; a new reader gets the existing objects.
func TestChangeLog(t *testing.T) {
	b := newChangeLog(2)
	read := func(at uint64, want ...string) uint64 {
		t.Helper()
		posts, now, err := since(b, at)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]bool{}
		for _, p := range posts {
			got[p.key.name+"="+string(p.uid)] = true
		}
		if len(posts) != len(want) {
			t.Errorf("since %d: %v, want %v", at, got, want)
		}
		for _, w := range want {
			if !got[w] {
				t.Errorf("since %d: %v, want %v", at, got, want)
			}
		}
		return now
	}
	put := func(i int, uid string, gone bool) { b.recordChange(serviceNotice(i, uid, gone)) }
	read(0)
	put(1, "a", false)
	put(2, "b", false)
	at := read(0, "s1=a", "s2=b")
	read(at)
	put(1, "a", false)
	put(1, "a", false)
	at = read(at, "s1=a")
	put(2, "b", true)
	read(0, "s1=a")
	read(at, "s2=b")
	put(2, "c", false) // same name again: the deletion record is dropped
	read(0, "s1=a", "s2=c")
	read(at, "s2=c")
	if b.deletions.Len() != 0 || b.order.Len() != 2 {
		t.Errorf("%d posts, %d of them gone", b.order.Len(), b.deletions.Len())
	}
}

// The number of deletion records is bounded. A reader that is further behind must resynchronise;
// other readers need not.
func TestChangeLogDropsDeletions(t *testing.T) {
	b := newChangeLog(3)
	b.recordChange(serviceNotice(0, "0", false))
	_, before, _ := since(b, 0)
	for i := 1; i <= 1000; i++ {
		_, at, _ := since(b, 0)
		b.recordChange(serviceNotice(i, "x", false))
		b.recordChange(serviceNotice(i, "x", true))
		if posts, _, err := since(b, at); err != nil || len(posts) != 1 {
			t.Fatalf("a reader that is up to date gets %d records, %v", len(posts), err)
		}
	}
	if len(b.records) != 4 || b.order.Len() != 4 || b.deletions.Len() != 3 {
		t.Errorf("%d posts in %d places, %d of them gone", len(b.records), b.order.Len(), b.deletions.Len())
	}
	if _, _, err := since(b, before); !errors.Is(err, errBehind) {
		t.Errorf("a reader that has missed deletions gets %v", err)
	}
	if posts, _, err := since(b, 0); err != nil || len(posts) != 1 {
		t.Errorf("a new reader gets %d records, %v", len(posts), err)
	}
}

// The first batch after a pause is immediate. Requests during the pause are combined into one
// batch; the pause grows with the number of sessions. No request is lost.
func TestBatches(t *testing.T) {
	for _, c := range []struct {
		sessions int
		next     time.Duration // time between the first and the second batch
	}{{10, 20 * time.Millisecond}, {500, time.Second}, {100000, 2 * time.Second}} {
		virtual.Test(t, func(t *testing.T) {
			var w batches
			var sent []time.Duration
			began := time.Now()
			batch := func() int { sent = append(sent, time.Since(began)); return c.sessions }
			w.requestBatch(batch)
			for range 100 {
				w.requestBatch(batch)
			}
			time.Sleep(time.Minute)
			virtual.Wait()
			if len(sent) != 2 || sent[0] != 0 || sent[1] != c.next {
				t.Errorf("%d sessions: batches at %v, want 0 and %v", c.sessions, sent, c.next)
			}
			w.requestBatch(batch)
			if len(sent) != 3 || sent[2] != time.Minute {
				t.Errorf("%d sessions: after a pause batches at %v", c.sessions, sent)
			}
			time.Sleep(time.Minute)
		})
	}
}

// A session's memory for objects that every node gets does not depend on the size of the cluster.
func TestAssignmentDoesNotGrowWithTheCluster(t *testing.T) {
	w := newWorld(maxDeletionRecords)
	for i := range 1000 {
		w.set(service(i), &v1.Service{})
	}
	told := func(c change) (n int) {
		for _, set := range sets(t, c, false) {
			n += len(set.Upserts)
		}
		return n
	}
	a := newAssignment("w1", w, Resumption{})
	if c, err := a.computeChange(nil); err != nil || told(c) != 1000 {
		t.Fatalf("%d objects, %v", told(c), err)
	}
	if len(a.held) != 0 || len(a.refs) != 0 {
		t.Errorf("the session remembers %d objects and %d references", len(a.held), len(a.refs))
	}
	w.set(service(7), &v1.Service{})
	w.remove(service(8))
	if c, err := a.computeChange(nil); err != nil || told(c) != 1 || len(c.deletes) != 1 {
		t.Errorf("%d and %d objects, %v", told(c), len(c.deletes), err)
	}
}

// P20: a session that an EndpointSlice wakes sends the slice's revision with it. With the previous
// revision, proxies would report too old a state, and terminating pods would wait for the gate's
// limit.
func TestSliceRevisionIsSetBeforeSessionsWake(t *testing.T) {
	v := &View{objects: newChangeLog(2), encodings: newEncodings(), gate: NewStopGate(time.Second)}
	s := sliceOf(map[types.UID]bool{gatedPod: true})
	s.Namespace, s.Name, s.ResourceVersion = "default", "a", "7"
	v.mu.Lock() // no session holds the lock, so a wake-up blocks here
	woken := make(chan struct{})
	go func() {
		v.handleChange(kindEndpointSlice, nil, s)
		close(woken)
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err := wait.For(ctx, time.Millisecond, func() error {
		if rev := v.sliceRevision.Load(); rev != 7 {
			return fmt.Errorf("revision %d", rev)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	v.mu.Unlock()
	<-woken
	if v.gate.podsBySlice[keyOf(kindEndpointSlice, s)] == nil {
		t.Error("the gate does not know the slice")
	}
}
