package server

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// work is how the parts of the leader's work are on this replica. Safe for concurrent use; the zero value does nothing.
type work struct {
	mu     sync.Mutex
	begun  bool
	faults map[string]fault
}

type fault struct {
	at    time.Time
	until time.Time // when the part counts as well again, unless it fails before
	err   error
}

// mending is how long a part has to run, after it was begun again, before it counts as well.
const mending = 10 * time.Second

// maxFault bounds what is told of an error, in bytes.
const maxFault = 1024

func (w *work) begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun, w.faults = true, map[string]fault{}
}

func (w *work) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun, w.faults = false, nil
}

// failed notes that a part failed now and is begun again after a delay.
func (w *work) failed(part string, err error, again time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := time.Now(); w.begun {
		w.faults[part] = fault{at: now, until: now.Add(again + mending), err: err}
	}
}

// state says whether the parts have begun, as a ClusterStatus does, and which of them are not well.
func (w *work) state() (begun string, failing []api.ClusterPart) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	for name, f := range w.faults {
		if now.Before(f.until) {
			failing = append(failing, api.ClusterPart{Name: name, Since: f.at.UnixMilli(), Error: api.Clip(f.err.Error(), maxFault)})
		}
	}
	slices.SortFunc(failing, func(a, b api.ClusterPart) int { return cmp.Compare(a.Name, b.Name) })
	if !w.begun {
		return api.WorkWaiting, nil
	}
	return api.WorkBegun, failing
}
