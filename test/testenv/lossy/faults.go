package lossy

import (
	"fmt"
	"path"
	"sync"
	"time"
)

// Operation is a kind of operation on a disk.
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

// faults is the set of faults of a disk. Except for a planned power cut, they persist after a
// Crash.
type faults struct {
	mu      sync.Mutex
	rules   []*rule
	limit   int64
	delay   time.Duration
	changes uint64        // requested so far
	cutAt   uint64        // number of the change at which the power is cut; 0 = no cut
	stallAt uint64        // number of the first change that blocks; 0 = no stall
	stalled chan struct{} // closed when the first change blocks
	resumed chan struct{} // closed when blocked changes return
	trace   func(string)
}

// rule makes operations on matching files fail.
type rule struct {
	operation Operation
	pattern   string
	left      int // failures left; negative: unlimited
}

// mustFail reports whether an operation must fail, and counts the failure.
func (f *faults) mustFail(o Operation, name string) bool {
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

// countChange counts a change and reports whether the power is cut at it. If resumed is not nil,
// the change blocks until resumed is closed and then fails.
func (f *faults) countChange(o Operation, name string) (cut bool, resumed <-chan struct{}) {
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

// waitForDelay waits for the delay of a sync, or until the power is cut.
func (f *faults) waitForDelay(dark <-chan struct{}) {
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

// Fail makes the next operations of a kind fail with EIO on files with a name that matches pattern
// (see path.Match); Sync also matches folders. It applies to this number of operations, or until
// Heal if times is negative. Only Read, Write and Sync can fail.
//
// A failed Sync behaves as on Linux: the changes are marked clean and never become durable. They
// stay readable, also for other processes, while the kernel has them in its page cache. A Read
// fails only if the kernel has no cached copy: after a Crash, or at the first read.
func (d *Disk) Fail(o Operation, pattern string, times int) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.rules = append(d.faults.rules, &rule{o, pattern, times})
}

// Limit sets the capacity of the disk in bytes, allocated in blocks of 4 KiB. Writes beyond it fail
// with ENOSPC. 0 means no limit.
func (d *Disk) Limit(bytes int64) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.limit = bytes
}

// Used returns the number of allocated bytes.
func (d *Disk) Used() int64 {
	v := d.currentVolume()
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.used
}

// SlowSync adds a delay to every later sync.
func (d *Disk) SlowSync(delay time.Duration) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.delay = delay
}

// StallAt plans a stall: the n-th change from now, counted from 1, and all later changes block. The
// channel is closed when the n-th change blocks. A process that is killed then has made exactly n-1
// changes. Resume ends the stall.
func (d *Disk) StallAt(n uint64) (stalled <-chan struct{}) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.stallAt = d.faults.changes + max(1, n)
	d.faults.stalled, d.faults.resumed = make(chan struct{}), make(chan struct{})
	return d.faults.stalled
}

// Resume ends or cancels a stall. Blocked changes fail with EIO; later changes are made.
func (d *Disk) Resume() {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	if d.faults.stallAt != 0 {
		close(d.faults.resumed)
		d.faults.stallAt = 0
	}
}

// Heal ends all faults except a stall, and cancels a planned power cut.
func (d *Disk) Heal() {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.rules, d.faults.limit, d.faults.delay, d.faults.cutAt = nil, 0, 0, 0
}

// Changes returns the number of changes, including syncs, that were requested since the disk was
// created.
func (d *Disk) Changes() uint64 {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	return d.faults.changes
}

// CutAt plans a power cut at the n-th change from now, counted from 1, which fails. 0 cancels the
// plan.
func (d *Disk) CutAt(n uint64) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.cutAt = 0
	if n > 0 {
		d.faults.cutAt = d.faults.changes + n
	}
}

// Trace calls f before every change with a text such as "sync raft.db". nil ends the trace. f must
// not use the disk.
func (d *Disk) Trace(f func(change string)) {
	d.faults.mu.Lock()
	defer d.faults.mu.Unlock()
	d.faults.trace = f
}
