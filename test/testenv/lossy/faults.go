package lossy

import (
	"fmt"
	"path"
	"sync"
	"time"
)

// Operation is something that a disk is asked to do.
type Operation uint8

const (
	Read Operation = iota
	Write
	Resize
	Create
	Rename
	Remove
	Sync
)

func (o Operation) String() string {
	return [...]string{"read", "write", "resize", "create", "rename", "remove", "sync"}[o]
}

// faults are what is wrong with a disk. They outlast power cuts.
type faults struct {
	mu      sync.Mutex
	rules   []*rule
	limit   int64
	delay   time.Duration
	changes uint64        // asked for so far
	cutAt   uint64        // the change that finds the power gone; 0 = none
	stallAt uint64        // the change from which on none comes back; 0 = none
	stalled chan struct{} // closed when that has come
	resumed chan struct{} // closed when they come back
	trace   func(string)
}

// rule lets operations on files fail.
type rule struct {
	operation Operation
	pattern   string
	left      int // negative: for ever
}

// hit says that an operation must fail, and counts it.
func (f *faults) hit(o Operation, name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rules {
		if matches, _ := path.Match(r.pattern, name); r.operation == o && matches && r.left != 0 {
			r.left = max(-1, r.left-1)
			return true
		}
	}
	return false
}

// counted counts a change and says whether the power goes with it. When
// resumed is not nil the change fails once that is closed.
func (f *faults) counted(o Operation, name string) (cut bool, resumed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes++
	if f.trace != nil {
		f.trace(fmt.Sprintf("%s %s", o, name))
	}
	if f.stallAt != 0 && f.changes >= f.stallAt {
		if f.changes == f.stallAt {
			close(f.stalled)
		}
		resumed = f.resumed
	}
	return f.cutAt != 0 && f.changes >= f.cutAt, resumed
}

func (f *faults) capacity() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.limit
}

// wait takes as long as a sync takes on this disk.
func (f *faults) wait(dark <-chan struct{}) {
	f.mu.Lock()
	delay := f.delay
	f.mu.Unlock()
	if delay <= 0 {
		return
	}
	t := time.NewTimer(delay)
	defer t.Stop()
	select {
	case <-t.C:
	case <-dark:
	}
}

// Fail lets the next operations of a kind fail with EIO, on files (or folders,
// for Sync) whose name matches the pattern of path.Match; so many times, or
// until Heal when times is negative. Only Read, Write and Sync can fail.
//
// After a failed Sync the disk does what Linux does: what was to be synced counts
// as clean and never reaches the platter, but stays readable, also for the next
// process, as long as the kernel has it in memory. A Read fails only where the
// kernel has no copy: after a Crash, or the first time.
func (d *Disk) Fail(o Operation, pattern string, times int) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.rules = append(d.faults.rules, &rule{o, pattern, times})
}

// Limit bounds how many bytes the disk takes, counted in blocks of 4 KiB; then
// writes fail with ENOSPC. 0 = no bound.
func (d *Disk) Limit(bytes int64) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.limit = bytes
}

// Used is how many bytes are taken.
func (d *Disk) Used() int64 {
	v := d.volume()
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.used
}

// SlowSync makes every sync take so much longer.
func (d *Disk) SlowSync(by time.Duration) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.delay = by
}

// StallAt plans a standstill: the n-th change from now, which begins at 1, and
// all after it do not come back. The channel is closed when that happens. A
// process that is killed then has come exactly so far; Resume goes with it.
func (d *Disk) StallAt(n uint64) (stalled <-chan struct{}) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.stallAt = d.faults.changes + max(1, n)
	d.faults.stalled, d.faults.resumed = make(chan struct{}), make(chan struct{})
	return d.faults.stalled
}

// Resume ends a standstill, or takes the plan back: the changes that waited
// fail with EIO, those that come later are made.
func (d *Disk) Resume() {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	if d.faults.stallAt != 0 {
		close(d.faults.resumed)
		d.faults.stallAt = 0
	}
}

// Heal ends all faults: nothing fails, is slow or full, and no power cut is planned.
func (d *Disk) Heal() {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.rules, d.faults.limit, d.faults.delay, d.faults.cutAt = nil, 0, 0, 0
}

// Changes is how many changes, syncs among them, the disk was asked for since it was made.
func (d *Disk) Changes() uint64 {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	return d.faults.changes
}

// CutAt plans a power cut: the n-th change from now finds the power gone. n
// begins at 1; 0 takes the plan back.
func (d *Disk) CutAt(n uint64) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.cutAt = 0
	if n > 0 {
		d.faults.cutAt = d.faults.changes + n
	}
}

// Trace tells of every change, as "sync raft.db", before it is made; nil ends
// it. The function must not use the disk.
func (d *Disk) Trace(f func(change string)) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.trace = f
}
