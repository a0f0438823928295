package drive

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// memory is a target in memory with a fixed call duration. Watchers receive each put at once.
type memory struct {
	takes time.Duration
	fails error

	mu       sync.Mutex
	values   map[string][]byte
	watchers []func([]byte)
}

func (m *memory) call(ctx context.Context) error {
	if m.takes > 0 {
		select {
		case <-time.After(m.takes):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return m.fails
}

func (m *memory) Put(ctx context.Context, keys []string, values [][]byte) error {
	if err := m.call(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, k := range keys {
		if m.values == nil {
			m.values = make(map[string][]byte)
		}
		m.values[k] = values[i]
		for _, see := range m.watchers {
			see(values[i])
		}
	}
	return nil
}

func (m *memory) Get(ctx context.Context, _ string) error { return m.call(ctx) }

func (m *memory) List(_ context.Context, prefix string) (keys int, bytes int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, v := range m.values {
		if strings.HasPrefix(k, prefix) {
			keys, bytes = keys+1, bytes+int64(len(v))
		}
	}
	return keys, bytes, nil
}

func (m *memory) Watch(_ context.Context, _ string, seen func([]byte)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watchers = append(m.watchers, seen)
	return nil
}

func (m *memory) Backup(context.Context) (int64, error) { return 7, nil }

func engine(m *memory) *Engine { return NewEngine([]Connection{{"r1", m}, {"r2", m}}) }

// In virtual time a closed loop is exact: three clients, calls of 100 ms, one second.
func TestLoopCountsEveryCall(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		r := engine(&memory{takes: 100 * time.Millisecond}).ExecuteRequest(t.Context(),
			Request{ID: 1, Do: DoPut, Clients: 3, Size: 10, Duration: 950 * time.Millisecond, Times: true})
		if r.Error != "" || len(r.Micros) != 30 || len(r.Acks) != 30 || r.Took != 1 {
			t.Errorf("%d calls, %d acks in %v s: %s", len(r.Micros), len(r.Acks), r.Took, r.Error)
		}
		for _, us := range r.Micros {
			if us != 100_000 {
				t.Errorf("a call took %d µs", us)
			}
		}
	})
}

func TestLoopCountsFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		r := engine(&memory{fails: errors.New("broken")}).ExecuteRequest(t.Context(),
			Request{ID: 1, Do: DoGet, Clients: 1, Count: 1, Duration: 48 * time.Millisecond})
		if r.Failed != 10 || r.Error != "broken" || len(r.Micros) != 0 {
			t.Errorf("%d failed (%s), %d did not; one of 5 ms each in 48 ms", r.Failed, r.Error, len(r.Micros))
		}
	})
}

// A stopped load waits for calls in progress until endGrace.
func TestEnd(t *testing.T) {
	for _, c := range []struct {
		takes              time.Duration
		addFailure, passed int
		took               float64
	}{
		{time.Second, 0, 2, 1},
		{time.Hour, 2, 0, 2.5},
	} {
		virtual.Test(t, func(t *testing.T) {
			e := engine(&memory{takes: c.takes})
			got := make(chan Reply)
			go func() {
				got <- e.ExecuteRequest(t.Context(), Request{ID: 7, Do: DoPut, Clients: 2, Size: 1,
					Duration: time.Hour})
			}()
			<-time.After(500 * time.Millisecond)
			e.ExecuteRequest(t.Context(), Request{ID: 8, Do: DoEnd, Of: 7})
			if r := <-got; r.Failed != c.addFailure || len(r.Micros) != c.passed || r.Took != c.took {
				t.Errorf("calls of %s: %d failed, %d passed in %v s, want %+v", c.takes, r.Failed,
					len(r.Micros), r.Took, c)
			}
		})
	}
}

func TestFillAndList(t *testing.T) {
	m := &memory{}
	e := engine(m)
	if r := e.ExecuteRequest(t.Context(), Request{Do: DoFill, Clients: 3, Prefix: "/a/", Count: 101, Size: 9,
		Ops: 10}); r.Error !=
		"" {
		t.Fatal(r.Error)
	}
	r := e.ExecuteRequest(t.Context(), Request{Do: DoList, Prefix: "/a/", Count: 4})
	if r.Keys != 101 || r.Bytes != 909 || len(r.Micros) != 4 {
		t.Errorf("%d keys, %d bytes, %d lists", r.Keys, r.Bytes, len(r.Micros))
	}
	if string(m.values[FillKey("/a/", 0)]) == string(m.values[FillKey("/a/", 1)]) {
		t.Error("two keys have the same value")
	}
}

func TestWatchersSeeWhatPacePuts(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		e := engine(&memory{takes: time.Millisecond})
		if r := e.ExecuteRequest(t.Context(), Request{Do: DoWatch, Prefix: "/w/", Clients: 5,
			Count: 3}); r.Error != "" {
			t.Fatal(r.Error)
		}
		acked := e.ExecuteRequest(t.Context(), Request{Do: DoPace, Prefix: "/w/", Count: 3,
			Every: 10 * time.Millisecond})
		r := e.ExecuteRequest(t.Context(), Request{Do: DoWatched, Prefix: "/w/"})
		if r.Error != "" || len(r.Arrivals) != 5 {
			t.Fatalf("%d watchers: %s", len(r.Arrivals), r.Error)
		}
		for _, seen := range r.Arrivals {
			if !slices.Equal(seen, acked.Acks) {
				t.Errorf("seen at %v, acknowledged at %v", seen, acked.Acks)
			}
		}
		if r := e.ExecuteRequest(t.Context(), Request{Do: DoWatched, Prefix: "/w/"}); r.Error == "" {
			t.Error("watchers that were stopped have reported")
		}
	})
}

// A watcher that misses a put or receives a put twice makes the measurement fail.
func TestWatchersMustSeeEverythingInOrder(t *testing.T) {
	for name, order := range map[string][]byte{"a gap": {0, 2, 1, 2}, "twice": {0, 0, 1, 2}} {
		m := &memory{}
		e := engine(m)
		if r := e.ExecuteRequest(t.Context(), Request{Do: DoWatch, Prefix: "/w/", Clients: 1,
			Count: 3}); r.Error != "" {
			t.Fatal(r.Error)
		}
		for _, n := range order {
			m.watchers[0]([]byte{n, 0, 0, 0, 0, 0, 0, 0})
		}
		if r := e.ExecuteRequest(t.Context(), Request{Do: DoWatched, Prefix: "/w/"}); !strings.Contains(r.Error,
			"another value") {
			t.Errorf("%s: %q", name, r.Error)
		}
	}
}

func TestOrdersThatCannotBe(t *testing.T) {
	e := engine(&memory{})
	for want, o := range map[string]Request{
		"unknown order dance": {Do: "dance"},
		"no such member":      {Do: DoPut, Through: []string{"r9"}},
	} {
		if r := e.ExecuteRequest(t.Context(), o); !strings.Contains(r.Error, want) {
			t.Errorf("%+v: %q", o, r.Error)
		}
	}
}

// Requests run concurrently. Replies carry the ID of their request.
func TestServe(t *testing.T) {
	in, orders := io.Pipe()
	replies, out := io.Pipe()
	lines := NewRequestReader(in)
	release := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if s, err := lines.ReadSetup(); err != nil || s.Name != "me" {
			t.Errorf("setup %+v, %v", s, err)
		}
		lines.ServeRequests(t.Context(), out, func(_ context.Context, o Request) Reply {
			if o.Do == "slow" {
				<-release
			} else {
				close(release)
			}
			return Reply{Leader: o.Do}
		})
	}()
	enc, dec := json.NewEncoder(orders), json.NewDecoder(replies)
	for _, line := range []any{Setup{Name: "me"}, Request{ID: 1, Do: "slow"}, Request{ID: 2, Do: "fast"}} {
		if err := enc.Encode(line); err != nil {
			t.Fatal(err)
		}
	}
	got := make(map[int]string)
	for range 2 {
		var r Reply
		if err := dec.Decode(&r); err != nil {
			t.Fatal(err)
		}
		got[r.ID] = r.Leader
	}
	if got[1] != "slow" || got[2] != "fast" {
		t.Errorf("got %v", got)
	}
	if err := orders.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
}

func TestValue(t *testing.T) {
	for _, size := range []int{0, 1, 8, 1023} {
		if v := RandomValue(size); len(v) != size {
			t.Errorf("%d bytes, want %d", len(v), size)
		}
	}
	if string(RandomValue(16)) == string(RandomValue(16)) {
		t.Error("two values are the same")
	}
}

// The heap is reported in bytes, and the counter of allocated bytes never decreases.
func TestRuntimeMeters(t *testing.T) {
	before := RuntimeMeters()
	kept := make([]byte, 16<<20)
	after := RuntimeMeters()
	if grown := after[MeterAllocated] - before[MeterAllocated]; grown < float64(len(kept)) {
		t.Errorf("%d bytes were allocated and %.0f counted", len(kept), grown)
	}
	if after[MeterHeap] < float64(len(kept)) {
		t.Errorf("the heap has %.0f bytes, with %d in use", after[MeterHeap], len(kept))
	}
	if r := CollectGarbage(); r.Error != "" || RuntimeMeters()[MeterCycles] <= before[MeterCycles] {
		t.Errorf("collected: %+v", r)
	}
	clear(kept)
}
